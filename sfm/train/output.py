"""The folder of a job's results, local or in an object store.

Layout: spec.yaml, statistics.json, metrics/*.jsonl, checkpoints/step-*/, summary.json, *.png.
"""

from __future__ import annotations

import os
from pathlib import Path

import fsspec

from sfm.spec import SfmError, Storage
from sfm.survey.store import storage_options


class OutputError(SfmError):
    """Results cannot be written or read where the spec says."""


class Output:
    """A folder at a URL. Objects appear whole or not at all: local files are renamed into place."""

    def __init__(self, url: str, storage: Storage) -> None:
        self.url = url.rstrip("/")
        self.local = "://" not in url
        self.files, self.root = fsspec.core.url_to_fs(self.url, **({} if self.local else storage_options(url, storage)))

    def path(self, name: str) -> str:
        """What `files` calls the object `name`."""
        return f"{self.root}/{name}"

    def write(self, name: str, content: bytes) -> None:
        """Create or replace object `name`.

        Raises:
            OutputError: the store refused.
        """
        try:
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
        except OSError as error:
            raise OutputError(
                f"output {self.url}: cannot write {name}: {error}; check the URL and its permissions"
            ) from None

    def read(self, name: str) -> bytes | None:
        """Content of object `name`, None where there is none."""
        self.files.invalidate_cache()
        try:
            return self.files.cat_file(self.path(name))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OutputError(
                f"output {self.url}: cannot read {name}: {error}; check the URL and its permissions"
            ) from None

    def list(self, name: str) -> list[str]:
        """Names of the entries right under folder `name`, sorted; empty where there is no such folder."""
        self.files.invalidate_cache()
        try:
            return sorted(
                entry.rstrip("/").rsplit("/", 1)[-1] for entry in self.files.ls(self.path(name), detail=False)
            )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise OutputError(
                f"output {self.url}: cannot list {name}: {error}; check the URL and its permissions"
            ) from None

    def remove(self, name: str) -> None:
        """Remove folder `name` and all under it."""
        self.files.rm(self.path(name), recursive=True)
