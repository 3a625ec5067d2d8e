"""Objects of a store as bytes: local files, obstore (Rust) or s3fs behind one call that many threads may make."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from pathlib import Path
from typing import Any, Protocol

from sfm.spec import Storage
from sfm.survey.clients import SurveyError, is_local, local_path, object_path, rust_store, s3fs_client, status

Bytes = bytes | memoryview


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
    return _Rust(rust_store(url, storage, retries=0), verify=storage.verify)


class _Files:
    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Bytes | None:
        try:
            with open(self.root / key, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                first = max(size + start, 0) if start < 0 else start
                last = size if stop is None else min(stop, size)
                return os.pread(file.fileno(), max(last - first, 0), first)
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
