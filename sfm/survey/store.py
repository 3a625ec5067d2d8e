"""Where a survey lies: a local folder or an object store, opened as a Zarr group."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import zarr
from zarr.errors import ContainsArrayError, NodeTypeValidationError
from zarr.storage import FsspecStore, LocalStore, ObjectStore

from sfm.spec import Storage
from sfm.survey.clients import (
    PASSING,
    READ_SECONDS,
    NoCredentialsError,
    SurveyError,
    is_local,
    local_path,
    object_path,
    rust_store,
    s3_place,
    s3fs_client,
    status,
)
from sfm.survey.failures import chain
from sfm.survey.objects import objects_at
from sfm.survey.plain import BrokenBodyError

if TYPE_CHECKING:
    from zarr.abc.store import Store


_RETRIES = 3  # of requests for metadata


def open_group(url: str, storage: Storage | None = None) -> zarr.Group:
    """Open the Zarr group at `url` at a local path or on an object store, read only, Zarr v2 or v3.

    Raises:
        SurveyError: nothing is there, it is no Zarr group, or the store refuses or does not answer.
    """
    storage = storage or Storage()
    store = zarr_store(url, storage)
    try:
        # Consolidated metadata may be stale and may describe members this zarr cannot parse; arrays are opened by name.
        # One format after the other: asked for both at once, zarr abandons the second request when the first fails.
        try:
            return zarr.open_group(store, mode="r", zarr_format=3, use_consolidated=False)
        except FileNotFoundError:
            return zarr.open_group(store, mode="r", zarr_format=2, use_consolidated=False)
    except FileNotFoundError:
        raise _nothing_at(url, storage) from None
    except (ContainsArrayError, NodeTypeValidationError, ValueError, KeyError) as error:
        raise not_mdio(url, f"its root is no Zarr group ({error})") from None
    except Exception as error:
        raise explain(error, url, storage) from error


def not_mdio(url: str, reason: str) -> SurveyError:
    """The sentence for a place that holds something other than a survey."""
    return SurveyError(f"{url} is not an MDIO store: {reason}; 'sfm ingest' makes MDIO from SEG-Y")


def explain(error: BaseException, url: str, storage: Storage, *, action: str = "read") -> SurveyError:
    """Turn what a store threw while `url` was being read (or `action`) into a sentence."""
    from botocore import exceptions as boto
    from obstore import exceptions as rust

    where = place(url, storage)
    said = " ".join(str(cause) for cause in chain(error))
    if "config profile" in said:  # botocore, whichever client asked it
        return SurveyError(
            f"{url}: there is no profile '{storage.profile or os.environ.get('AWS_PROFILE')}' in the AWS configuration "
            "files (~/.aws/config, ~/.aws/credentials); name another in storage.profile"
        )
    if "performing token request" in said:
        return SurveyError(
            f"{url}: no credentials for {where}; set GOOGLE_APPLICATION_CREDENTIALS (gs://), AZURE_STORAGE_ACCOUNT_NAME and "
            "a key (az://), or storage.anonymous for a public bucket"
        )
    no_keys = (NoCredentialsError, boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound)
    causes = list(chain(error))
    for cause in causes:
        if isinstance(cause, SurveyError) and not isinstance(cause, NoCredentialsError):
            return cause
    for cause in causes:
        if isinstance(cause, no_keys) or "no credentials" in said:
            return SurveyError(
                f"{url}: no credentials for {where}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, storage.profile, "
                "or storage.anonymous for a public bucket"
            )
        if isinstance(cause, PermissionError) and is_local(url):
            return SurveyError(f"{url}: no permission to {action} it; check the owner and mode of the files")
        if isinstance(cause, (PermissionError, rust.PermissionDeniedError, rust.UnauthenticatedError)):
            return SurveyError(
                f"{url}: {where} refuses permission to {action} it ({_first_line(cause)}); check the {_keys(url)} "
                "and what they may do with this bucket"
            )
        if isinstance(cause, (boto.ConnectionError, boto.HTTPClientError, ConnectionError, TimeoutError)) or (
            isinstance(cause, rust.GenericError) and "error sending request" in str(cause)
        ):
            return SurveyError(
                f"{url}: cannot connect to {where}; check that the server runs, that {_endpoint(url)} names it, and that its "
                "certificate is trusted (AWS_CA_BUNDLE)"
            )
        if isinstance(cause, (rust.GenericError, BrokenBodyError)) and "timed out" in str(cause):
            return SurveyError(
                f"{url}: {where} sent nothing for {READ_SECONDS} seconds; check the network, or try again later"
            )
    answered = next((status(cause) for cause in causes if status(cause) in PASSING), None)
    if answered:
        return SurveyError(
            f"{url}: {where} is overloaded or out of order: it answered {answered}, asked again and again; "
            "try later, or with fewer workers at a time"
        )
    return SurveyError(f"{url}: cannot {action} it: {type(error).__name__}: {_first_line(error)}")


def place(url: str, storage: Storage) -> str:
    """Who answers for `url`, in words."""
    if url.startswith("s3://"):
        return s3_place(storage)[0] or "AWS (no AWS_ENDPOINT_URL is set)"
    return storage.endpoint_url or "the server of " + "/".join(url.split("/")[:3])


def _keys(url: str) -> str:
    """Where the credentials for `url` are set."""
    names = {"s3": "keys (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)", "gs": "keys (GOOGLE_APPLICATION_CREDENTIALS)"}
    return {**names, "az": "keys (AZURE_STORAGE_ACCOUNT_NAME and its key)"}.get(url.partition("://")[0], "credentials")


def _endpoint(url: str) -> str:
    """What names the server of `url`."""
    if url.startswith("s3://"):
        return "AWS_ENDPOINT_URL or storage.endpoint_url"
    return "storage.endpoint_url" if url.startswith(("gs://", "az://")) else "the URL"


def _first_line(error: BaseException) -> str:
    """What an error says, without the pages that obstore adds for programmers."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def zarr_store(url: str, storage: Storage) -> Store:
    """Where Zarr finds the metadata of a survey."""
    if is_local(url):
        path = local_path(url)
        if path.is_file():
            raise not_mdio(url, "it is a file, not a folder")
        return LocalStore(path, read_only=True)
    if storage.client == "s3fs":
        return FsspecStore(s3fs_client(url, storage, asynchronous=True), read_only=True, path=object_path(url))
    return ObjectStore(rust_store(url, storage, _RETRIES), read_only=True)


def _nothing_at(url: str, storage: Storage) -> SurveyError:
    """Why there is no Zarr group at `url`: nothing at all, or something else."""
    try:
        something = objects_at(url, storage).any()
    except Exception as error:  # noqa: BLE001 - becomes the sentence
        if any(status(cause) == 404 for cause in chain(error)):
            return SurveyError(f"no survey at {url}: there is no such bucket; check the name, and storage.endpoint_url")
        return explain(error, url, storage)
    if something:
        return not_mdio(url, "it holds no Zarr metadata at its root")
    return SurveyError(f"no survey at {url}; check the name, or make it with 'sfm ingest'")
