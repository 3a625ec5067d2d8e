"""Clients of object stores: obstore for every scheme, s3fs for s3://. Made once for each store and set of credentials."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from sfm.spec import SfmError, Storage

SCHEMES = ("s3", "gs", "az", "https", "http")
CONNECT_SECONDS = 10
READ_SECONDS = 20
"""A body that brings nothing for so long is given up."""
REQUEST_SECONDS = 60
"""A request that has not ended by then is given up."""
PASSING = (429, 500, 502, 503, 504)
"""HTTP status of what may go better a moment later."""


class SurveyError(SfmError):
    """A survey is missing, out of reach, malformed, or unfit for what is asked of it."""


def status(error: BaseException) -> int | None:
    """The HTTP status that an error of obstore or s3fs tells of."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    if isinstance(response, dict):
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
    _, found, rest = str(error).partition("status code: ")
    return int(rest[:3]) if found and rest[:3].isdigit() else None


def is_local(url: str) -> bool:
    """Whether `url` names a place in the local file system."""
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> Path:
    """The path of a local `url`, with or without `file://`."""
    return Path(url.removeprefix("file://")).expanduser()


def object_path(url: str, schemes: tuple[str, ...] = ("s3",)) -> str:
    """`bucket/key` of a URL like `s3://bucket/key`.

    Raises:
        SurveyError: another scheme, or no bucket.
    """
    scheme, _, path = url.partition("://")
    if scheme not in schemes:
        known = ", ".join(f"{name}://" for name in schemes)
        raise SurveyError(f"{url}: only local paths and {known} are served here, not '{scheme}://'")
    path = path.strip("/")
    if not path:
        raise SurveyError(f"{url}: names no bucket; write {scheme}://bucket/key")
    return path


def s3_place(storage: Storage) -> tuple[str | None, str | None]:
    """Endpoint and region of an S3-protocol store: what `storage` states, else what the environment says.

    Raises:
        SurveyError: the endpoint is no URL.
    """
    environment = os.environ
    endpoint = storage.endpoint_url or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    region = storage.region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    return endpoint and _url(endpoint), region


def _url(endpoint: str) -> str:
    if not endpoint.startswith(("http://", "https://")):
        raise SurveyError(f"endpoint {endpoint} is no URL; write http://{endpoint} or https://{endpoint}")
    return endpoint


def storage_options(url: str, storage: Storage) -> dict[str, Any]:
    """Options for s3fs (empty for a local path).

    Credentials are found by botocore in its usual places (environment, profile, instance role).

    Raises:
        SurveyError: the scheme of `url` is neither `s3` nor local.
    """
    if is_local(url):
        return {}
    object_path(url)
    endpoint, region = s3_place(storage)
    options: dict[str, Any] = {
        "anon": storage.anonymous,
        # The default pool of 10 connections is what limits s3fs, not the network.
        "config_kwargs": {
            "max_pool_connections": 128,
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "retries": {"mode": "standard", "max_attempts": 4},
        },
    }
    if storage.profile:
        options["profile"] = storage.profile
    if endpoint:
        options["endpoint_url"] = endpoint
    if region:  # botocore itself knows AWS_DEFAULT_REGION only
        options["client_kwargs"] = {"region_name": region}
    return options


def identity(url: str, storage: Storage) -> tuple[Any, ...]:
    """What tells one client from another: where, and with which credentials of the environment."""
    prefixes = ("AWS_", "GOOGLE_", "AZURE_", "SSL_CERT_")
    environment = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(prefixes)))
    return url, storage.model_dump_json(), environment


def rust_store(url: str, storage: Storage, retries: int) -> Any:
    """The obstore store whose root is `url`. Equal calls in one process share one, and its connections.

    Args:
        retries: how often it makes a failed request again by itself; 0 for those who do so themselves, and count.

    Raises:
        SurveyError: the scheme is none of `SCHEMES`, or options do not fit together.
    """
    check_stores()
    return _rust_store(identity(url, storage), storage, retries)


_first: list[int] = []  # the process that first asked a store


def check_stores() -> None:
    """Refuse to ask an object store in a child of a process that has asked one.

    Raises:
        SurveyError: this is such a child.
    """
    if not _first:
        _first.append(os.getpid())
    check_process(_first[0], "an object store was asked")


def check_process(home: int, what: str) -> None:
    """Refuse to go on in a child of process `home`, where `what` was done: its threads stayed behind.

    Raises:
        SurveyError: this is such a child.
    """
    if os.getpid() != home:
        raise SurveyError(
            f"{what} before this process was forked, and it would wait for ever for threads that stayed behind; start "
            "processes by spawn or forkserver"
        )


@lru_cache(maxsize=64)
def _rust_store(key: tuple[Any, ...], storage: Storage, retries: int) -> Any:
    from obstore.exceptions import BaseError
    from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

    url: str = key[0]
    path = object_path(url, SCHEMES)
    bucket, _, prefix = path.partition("/")
    scheme = url.partition("://")[0]
    client: dict[str, Any] = {
        "timeout": f"{REQUEST_SECONDS}s",
        "read_timeout": f"{READ_SECONDS}s",
        "connect_timeout": f"{CONNECT_SECONDS}s",
        "pool_max_idle_per_host": "256",
    }
    authority = os.environ.get("AWS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE")
    if authority:
        client["root_certificate"] = _certificate(authority)
    common: dict[str, Any] = {
        "prefix": prefix or None,
        "client_options": client,
        "retry_config": {"max_retries": retries, "retry_timeout": timedelta(seconds=REQUEST_SECONDS)},
    }
    try:
        if scheme == "s3":
            return S3Store(bucket, **common, **_s3_settings(storage, client))
        if scheme == "gs":
            return GCSStore(bucket, **common, **_stated(storage, client, "base_url"))
        if scheme == "az":
            name = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")  # left to find it by itself, obstore cannot show it
            if not name:
                raise SurveyError(f"{url}: of which account? Set AZURE_STORAGE_ACCOUNT_NAME, and its key or identity")
            return AzureStore(bucket, account_name=name, **common, **_stated(storage, client, "endpoint"))
        client["allow_http"] = scheme == "http"
        del common["prefix"]
        return HTTPStore(url, **common)
    except (BaseError, ValueError) as error:
        raise SurveyError(
            f"{url}: {str(error).splitlines()[0]}; check the URL, the credentials in the environment, and AWS_CA_BUNDLE "
            "or SSL_CERT_FILE"
        ) from error


def _s3_settings(storage: Storage, client: dict[str, Any]) -> dict[str, Any]:
    endpoint, region = s3_place(storage)
    settings: dict[str, Any] = {"region": region or "us-east-1"}
    if endpoint:
        client["allow_http"] = endpoint.startswith("http://")
        settings |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
    keys = {name: os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    if storage.anonymous:
        # Of its own keys, which it does not use: half a pair in the environment would be an error.
        settings |= {"skip_signature": True, "access_key_id": "none", "secret_access_key": "none"}
    elif storage.profile or not any(keys.values()):
        settings["credential_provider"] = _botocore_credentials(storage.profile)
    elif not all(keys.values()):
        given, missing = sorted(keys, key=lambda name: not keys[name])
        raise SurveyError(f"{given} is set and {missing} is not; set both, storage.profile, or storage.anonymous")
    return settings


def _stated(storage: Storage, client: dict[str, Any], endpoint: str) -> dict[str, Any]:
    """What `storage` says of a store of Google or Azure, which calls its server's URL `endpoint`."""
    settings: dict[str, Any] = {"skip_signature": True} if storage.anonymous else {}
    if storage.endpoint_url:
        settings[endpoint] = _url(storage.endpoint_url)
        client["allow_http"] = storage.endpoint_url.startswith("http://")
    return settings


class NoCredentialsError(SurveyError):
    """Nothing to sign requests with."""


def _botocore_credentials(profile: str | None) -> Callable[[], dict[str, Any]]:
    """Credentials as every AWS tool finds them: profile, SSO, web identity, container, instance role; renewed."""
    import botocore.session

    session = botocore.session.Session(profile=profile)

    def provide() -> dict[str, Any]:
        found = session.get_credentials()
        if found is None:
            raise NoCredentialsError("no credentials")
        frozen = found.get_frozen_credentials()  # fetched again by botocore shortly before they end
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(minutes=10),
        }

    return provide


def _certificate(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SurveyError(
            f"the certificates at {path} (AWS_CA_BUNDLE or SSL_CERT_FILE) cannot be read: {error.strerror}"
        ) from None


def s3fs_client(url: str, storage: Storage, *, asynchronous: bool = False) -> Any:
    """The s3fs client of the store of `url`, shared like those of obstore.

    Raises:
        SurveyError: the scheme of `url` is not s3.
    """
    object_path(url)
    check_stores()
    bucket = url.split("/", 3)[2]
    return _s3fs(identity(f"s3://{bucket}", storage), storage, asynchronous)


@lru_cache(maxsize=16)
def _s3fs(key: tuple[Any, ...], storage: Storage, asynchronous: bool) -> Any:
    import s3fs

    # fsspec's own cache does not look at the environment: it would hand out a client with earlier credentials.
    options = storage_options(key[0], storage)
    if not asynchronous:  # whoever reads chunks makes requests again by himself, and counts
        options["config_kwargs"]["retries"] = {"mode": "standard", "total_max_attempts": 1}
    files = s3fs.S3FileSystem(asynchronous=asynchronous, skip_instance_cache=True, **options)
    files.retries = files.retries if asynchronous else 1
    return files


def _is_not_about_sessions(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(("Unclosed client session", "Unclosed connector"))


# s3fs never closes the sessions of its asynchronous clients, and aiohttp complains of each when the process ends.
logging.getLogger("asyncio").addFilter(_is_not_about_sessions)
