"""The folder of a job's results, local or in an object store.

Layout: spec.yaml, metrics/*.jsonl, checkpoints/step-*/, summary.json, *.png.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec

from sfm.spec import Storage
from sfm.survey.clients import is_local, local_path, storage_options
from sfm.survey.store import explain


class Output:
    """A folder at a URL. Objects appear whole or not at all: local files are renamed into place.

    Every method raises SurveyError, a sentence, where the store refuses or does not answer.
    """

    def __init__(self, url: str, storage: Storage) -> None:
        self.url, self.storage = url.rstrip("/"), storage
        self.local = is_local(url)
        place = str(local_path(self.url)) if self.local else self.url
        self.files, self.root = fsspec.core.url_to_fs(place, **storage_options(url, storage))

    def path(self, name: str) -> str:
        """What `files` calls the object `name`."""
        return f"{self.root}/{name}"

    def write(self, name: str, content: bytes) -> None:
        """Create or replace object `name`."""
        with self._sentences("write"):
            if self.local:
                target = Path(self.path(name))
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_name(f".{target.name}.{os.getpid()}")
                with partial.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(target)
            else:
                self.files.pipe_file(self.path(name), content)

    def read(self, name: str) -> bytes | None:
        """Content of object `name`, None where there is none."""
        with self._sentences("read"):
            self.files.invalidate_cache()
            try:
                return self.files.cat_file(self.path(name))
            except FileNotFoundError:
                return None

    def list(self, name: str) -> list[str]:
        """Names of the entries right under folder `name`, sorted; empty where there is no such folder."""
        with self._sentences("list"):
            self.files.invalidate_cache()
            try:
                entries = self.files.ls(self.path(name), detail=False)
            except FileNotFoundError:
                return []
            return sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries)

    def remove(self, name: str) -> None:
        """Remove object or folder `name` and all under it."""
        with self._sentences("remove"):
            self.files.rm(self.path(name), recursive=True)

    @contextmanager
    def _sentences(self, action: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise explain(error, self.url, self.storage, action=action) from error
