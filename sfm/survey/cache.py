"""Chunks kept for later windows: decoded in memory, and as stored on a local disk."""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from sfm.survey.clients import SurveyError
from sfm.survey.objects import Bytes


class ChunkCache:
    """Decoded chunks in memory, the least recently used dropped beyond `budget` bytes. Threads may share it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.bytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._coming: dict[Hashable, Future[np.ndarray]] = {}

    def ask(self, key: Hashable) -> np.ndarray | Future[np.ndarray] | None:
        """The chunk, or the promise of whoever fetches it; None makes it the caller's to :meth:`bring` or :meth:`fail`."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            if key in self._coming:
                return self._coming[key]
            self._coming[key] = Future()
            return None

    def bring(self, key: Hashable, chunk: np.ndarray) -> None:
        """Keep a chunk that was asked for, and hand it to all who wait."""
        with self._lock:
            future = self._coming.pop(key)
            if chunk.nbytes <= self.budget:
                self._kept[key] = chunk
                self.bytes += chunk.nbytes
            while self.bytes > self.budget:
                _, dropped = self._kept.popitem(last=False)
                self.bytes -= dropped.nbytes
        future.set_result(chunk)

    def fail(self, key: Hashable, error: BaseException) -> None:
        """Tell all who wait that it does not come; who asks next tries again."""
        with self._lock:
            future = self._coming.pop(key)
        future.set_exception(error)

    def clear(self) -> None:
        """Forget all that is kept."""
        with self._lock:
            self._kept.clear()
            self.bytes = 0


class DiskCache:
    """Objects as stored, in files of a folder that the processes of a node share: those in `folder`/sfm-chunks.

    What goes beyond `budget` bytes is removed, the least recently used first; each process may be ahead of the others
    by a hundredth of it. A file is written under another name and then renamed, so none is ever seen half written; one
    that cannot be read counts as not there.

    Raises:
        SurveyError: the folder cannot be made.
    """

    def __init__(self, folder: str | Path, budget: int) -> None:
        self.folder, self.budget = Path(folder, "sfm-chunks"), budget  # of its own: what is old there is removed
        self._lock = threading.Lock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._estimate, self._news = sum(size for _, size, _ in self._files()), 0
        except OSError as error:
            raise SurveyError(
                f"resources.disk_cache {folder}: cannot be used: {error.strerror}; name a folder that workers may write"
            ) from None

    def get(self, survey: str, key: str) -> bytes | None:
        """What was kept of object `key`, if it still is."""
        path = self._path(survey, key)
        try:
            data = path.read_bytes()
            os.utime(path)  # file systems are often mounted without times of reading
        except OSError:
            return None
        return data

    def put(self, survey: str, key: str, data: Bytes) -> None:
        """Keep an object. A full or broken disk keeps none, and stops nothing."""
        if len(data) > self.budget:
            return
        name = self.folder / f".{uuid.uuid4().hex}"
        try:
            name.write_bytes(data)
            name.replace(self._path(survey, key))
        except OSError:
            name.unlink(missing_ok=True)
            return
        with self._lock:
            self._estimate += len(data)
            self._news += len(data)
            if self._estimate > self.budget or self._news > self.budget // 100:  # others write, too
                try:
                    self._evict()
                except OSError:  # the next one tries again
                    return

    def _evict(self) -> None:
        """If the budget is exceeded, remove files until nine tenths are taken. Other processes may do so, too."""
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files if total > self.budget else ():
            if total <= 0.9 * self.budget:
                break
            path.unlink(missing_ok=True)
            total -= size
        self._estimate, self._news = total, 0

    def _files(self) -> list[tuple[int, int, Path]]:
        """Time of last use, size and path of every file."""
        found = []
        for path in self.folder.iterdir():
            try:
                stat = path.stat()
            except FileNotFoundError:  # removed by another process meanwhile
                continue
            found.append((stat.st_mtime_ns, stat.st_size, path))
        return found

    def _path(self, survey: str, key: str) -> Path:
        return self.folder / hashlib.sha256(f"{survey}\n{key}".encode()).hexdigest()
