"""Where a survey lies: local folders and S3-protocol object stores."""

from __future__ import annotations

import json
import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import zarr
from zarr.core.sync import sync
from zarr.errors import ContainsArrayError, NodeTypeValidationError
from zarr.storage import FsspecStore, LocalStore

from sfm.spec import SfmError, Storage


class SurveyError(SfmError):
    """A survey is missing, out of reach, malformed, or unfit for what is asked of it."""


def is_local(url: str) -> bool:
    """Whether `url` names a place in the local file system."""
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> Path:
    """The path of a local `url`, with or without `file://`."""
    return Path(url.removeprefix("file://")).expanduser()


def object_path(url: str) -> str:
    """`bucket/key` of an `s3://` URL.

    Raises:
        SurveyError: another scheme, or no bucket.
    """
    scheme, _, path = url.partition("://")
    if scheme != "s3":
        raise SurveyError(f"{url}: only s3://bucket/key and local paths are served, not '{scheme}://'")
    path = path.strip("/")
    if not path:
        raise SurveyError(f"{url}: names no bucket; write s3://bucket/key")
    return path


def storage_options(url: str, storage: Storage) -> dict[str, Any]:
    """Options for s3fs (empty for a local path): what `storage` states, else what the environment says.

    Credentials are found by botocore in its usual places (environment, profile, instance role).

    Raises:
        SurveyError: the scheme of `url` is neither `s3` nor local.
    """
    if is_local(url):
        return {}
    object_path(url)
    environment = os.environ
    endpoint = storage.endpoint_url or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    region = storage.region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    options: dict[str, Any] = {
        "anon": storage.anonymous,
        # The default pool of 10 connections is what limits s3fs, not the network.
        "config_kwargs": {
            "max_pool_connections": 64,
            "connect_timeout": 10,
            "retries": {"mode": "standard", "max_attempts": 4},
        },
    }
    if endpoint:
        options["endpoint_url"] = endpoint
    if region:  # botocore itself knows AWS_DEFAULT_REGION only
        options["client_kwargs"] = {"region_name": region}
    return options


def open_group(url: str, storage: Storage | None = None) -> zarr.Group:
    """Open the Zarr group at `url` (`s3://bucket/key` or a local path), read only, Zarr v2 or v3.

    Raises:
        SurveyError: nothing is there, it is no Zarr group, or the store refuses or does not answer.
    """
    storage = storage or Storage()
    store = _local_store(url) if is_local(url) else _object_store(url, storage)
    try:
        # Consolidated metadata may be stale and may describe members this zarr cannot parse; arrays are opened by name.
        # One format after the other: asked for both at once, zarr abandons the second request when the first fails.
        try:
            return zarr.open_group(store, mode="r", zarr_format=3)
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

    endpoint = storage_options(url, storage).get("endpoint_url", "AWS (no AWS_ENDPOINT_URL is set)")
    for cause in _chain(error):
        if isinstance(cause, (boto.NoCredentialsError, boto.PartialCredentialsError)):
            return SurveyError(
                f"{url}: no credentials for {endpoint}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "or storage.anonymous for a public bucket"
            )
        if isinstance(cause, PermissionError):
            if is_local(url):
                return SurveyError(f"{url}: no permission to {action} it; check the owner and mode of the files")
            return SurveyError(
                f"{url}: {endpoint} refuses permission to {action} it ({cause}); check the keys "
                "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) and what they may do with this bucket"
            )
        if isinstance(cause, (boto.ConnectionError, boto.HTTPClientError, ConnectionError, TimeoutError)):
            return SurveyError(
                f"{url}: cannot connect to {endpoint}; check that the server runs and that AWS_ENDPOINT_URL "
                "or storage.endpoint_url names it"
            )
    return SurveyError(f"{url}: cannot {action} it: {type(error).__name__}: {error}")


def _chain(error: BaseException | None) -> list[BaseException]:
    """An exception and everything it came from."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _local_store(url: str) -> LocalStore:
    path = local_path(url)
    if path.is_file():
        raise not_mdio(url, "it is a file, not a folder")
    return LocalStore(path, read_only=True)


def _object_store(url: str, storage: Storage) -> FsspecStore:
    options = storage_options(url, storage)
    credentials = sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
    return FsspecStore(_files(json.dumps([options, credentials])), read_only=True, path=object_path(url))


@lru_cache(maxsize=16)
def _files(key: str) -> Any:
    """The s3fs client for (options, credentials in the environment), shared by all surveys of a store."""
    import s3fs

    # fsspec's own cache does not look at the environment: it would hand out a client with earlier credentials.
    return s3fs.S3FileSystem(asynchronous=True, skip_instance_cache=True, **json.loads(key)[0])


def _is_not_about_sessions(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(("Unclosed client session", "Unclosed connector"))


# s3fs never closes the sessions of its asynchronous clients, and aiohttp complains of each when the process ends.
logging.getLogger("asyncio").addFilter(_is_not_about_sessions)


def _nothing_at(url: str, storage: Storage) -> SurveyError:
    """Why there is no Zarr group at `url`: nothing at all, or something else."""
    if is_local(url):
        something = local_path(url).is_dir() and any(local_path(url).iterdir())
    else:
        try:
            something = sync(_object_store(url, storage).fs._exists(object_path(url)))
        except Exception as error:  # noqa: BLE001 - becomes the sentence
            return explain(error, url, storage)
    if something:
        return not_mdio(url, "it holds no Zarr metadata at its root")
    return SurveyError(f"no survey at {url}; check the name, or make it with 'sfm ingest'")
