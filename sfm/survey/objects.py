"""Objects of a store as bytes: local files, plain HTTP, obstore (Rust) or s3fs behind one call that many threads may make."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import numpy as np

from sfm.spec import Storage
from sfm.survey.clients import (
    PASSING,
    SurveyError,
    check_stores,
    is_local,
    local_path,
    object_path,
    rust_store,
    s3_place,
    s3fs_client,
    status,
)
from sfm.survey.plain import PlainServer, direct, plain_server

Bytes = bytes | memoryview
_SIGNED_FOR = timedelta(minutes=15)  # clocks may differ by as much where a request itself is signed, too


class DamagedError(SurveyError):
    """The bytes of an object are not the ones that were stored."""


class Objects(Protocol):
    """The objects under one URL."""

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Bytes | None:
        """Bytes `start` to `stop` of an object, cut at its end; the last ones where `start` is negative.

        Returns:
            None where there is no such object.

        Raises:
            Exception: whatever the store throws; most are worth another attempt.
        """

    def any(self) -> bool:
        """Whether anything lies here."""


def objects_at(url: str, storage: Storage) -> Objects:
    """The objects under `url`, by the client that `storage` chooses."""
    if is_local(url):
        return _Files(local_path(url))
    if storage.client == "s3fs":
        return _S3fs(s3fs_client(url, storage), object_path(url))
    store = rust_store(url, storage, retries=0)
    general = _Rust(store, verify=storage.verify)
    return general if storage.verify else _plainly(url, storage, store, general) or general


class _Files:
    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Bytes | None:
        try:
            with open(self.root / key, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                first = max(size + start, 0) if start < 0 else start
                last = size if stop is None else min(stop, size)
                body = np.empty(max(last - first, 0), np.uint8).data
                return body[: os.preadv(file.fileno(), [body], first)]
        except FileNotFoundError:
            return None

    def any(self) -> bool:
        return self.root.is_dir() and any(self.root.iterdir())


class _Rust:
    def __init__(self, store: Any, *, verify: bool) -> None:
        self.store, self.verify = store, verify

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Bytes | None:
        import obstore
        from obstore.exceptions import GenericError
        from obstore.store import AzureStore

        check_stores()
        if start < 0 and isinstance(self.store, AzureStore):  # which knows no range from the end
            try:
                size = int(obstore.head(self.store, key)["size"])
            except FileNotFoundError:
                return None
            return self.get(key, max(size + start, 0), size)
        options: Any = None
        if start < 0:
            options = {"range": {"suffix": -start}}
        elif stop is not None:
            options = {"range": (start, stop)}
        elif start:
            options = {"range": {"offset": start}}

        async def fetch() -> tuple[memoryview, str | None]:
            found = await obstore.get_async(self.store, key, options=options)
            return memoryview(await found.bytes_async()), found.meta["e_tag"]

        try:
            value, tag = asyncio.run_coroutine_threadsafe(fetch(), _loop()).result()
        except FileNotFoundError:
            return None
        except GenericError as error:
            if status(error) == 416:  # it ends before `start`
                return b""
            # Some servers answer a range that covers the whole object as if none had been asked for.
            if options is None or "non-partial response" not in str(error):
                raise
            whole = self.get(key)
            return whole if whole is None else whole[start:] if stop is None else whole[start:stop]
        if self.verify and options is None:
            _compare(key, value, tag)
        return value

    def any(self) -> bool:
        import obstore
        from obstore.store import HTTPStore

        if isinstance(self.store, HTTPStore):  # a web server lists nothing
            return False
        return any(bool(page) for page in obstore.list(self.store, chunk_size=1))


class _Plain:
    """Objects that a server hands out over plain HTTP, for the asking or to a signed URL.

    Args:
        target: path and query of a key; None where there is nothing to sign it with.
        general: asked where the server answers with something else: it knows redirects and refusals, and words for them.
    """

    def __init__(self, server: PlainServer, target: Callable[[str], str | None], general: Objects) -> None:
        self.server, self.target, self.general = server, target, general
        self._suffices = True

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Bytes | None:
        check_stores()
        target = self.target(key) if self._suffices else None
        if target is not None:
            found = self.server.get(target, start, stop)
            if found.body is not None or found.status == 404:
                return found.body
            if found.status in PASSING:
                raise OSError(f"status code: {found.status}")
        value = self.general.get(key, start, stop)
        if value:  # it was not given here, and is there
            self._suffices = False
        return value

    def any(self) -> bool:
        return self.general.any()


def _plainly(url: str, storage: Storage, store: Any, general: Objects) -> Objects | None:
    """The objects under `url` over plain HTTP, where that leads there."""
    import obstore

    s3 = url.startswith("s3://")
    place = direct((s3_place(storage)[0] or "") if s3 else url)
    if place is None:
        return None
    root = f"{place.path}/{quote(object_path(url))}/" if s3 else f"{place.path}/"

    def signed(key: str) -> str | None:
        try:
            there = urlsplit(obstore.sign(store, "GET", key, _SIGNED_FOR))
        except Exception:  # noqa: BLE001 - the general client says why, or does without
            return None
        return f"{there.path}?{there.query}"

    def unsigned(key: str) -> str:
        return root + quote(key)

    signs = s3 and not storage.anonymous and not os.environ.get("AWS_SKIP_SIGNATURE")  # which obstore heeds
    return _Plain(plain_server(place.host, place.port), signed if signs else unsigned, general)


_loops: list[asyncio.AbstractEventLoop] = []
_making = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """Where obstore's requests are awaited: a thread that waits for one is woken for every 16 KiB of TLS."""
    with _making:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=_loops[0].run_forever, name="obstore", daemon=True).start()
        return _loops[0]


class _S3fs:
    def __init__(self, files: Any, root: str) -> None:
        self.files, self.root = files, root

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Bytes | None:
        check_stores()
        try:
            value: bytes = self.files.cat_file(f"{self.root}/{key}", start=start or None, end=stop)
            return value
        except FileNotFoundError:
            return None
        except OSError as error:
            if status(error) == 416:
                return b""
            raise

    def any(self) -> bool:
        return bool(self.files.exists(self.root))


def _compare(key: str, value: Bytes, tag: str | None) -> None:
    """Compare with the MD5 sum that S3 states for an object written in one piece, under one of its own keys."""
    stated = (tag or "").strip('"').lower()
    if len(stated) != 32 or not set(stated) <= set("0123456789abcdef"):
        return  # no such sum: written in parts, or by a store that counts otherwise
    if hashlib.md5(value, usedforsecurity=False).hexdigest() != stated:
        raise DamagedError(f"object {key} does not match the checksum that its store states")
