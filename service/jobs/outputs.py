"""What a job leaves in its output directory: metrics, pictures, summary. Local or `s3://`.

Names are ours: nothing that a client sends becomes part of a path.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

import fsspec

from sfm.spec import Storage

ARTIFACTS = {
    "reconstruction.png": "image/png",
    "loss.png": "image/png",
    "summary.json": "application/json",
    "spec.yaml": "application/yaml",
}
"""Names that can be fetched, and their media types."""


class Output:
    """A job's output directory at `url`. Methods block."""

    def __init__(self, url: str, storage: Storage) -> None:
        options = _s3_options(storage) if url.startswith("s3://") else {}
        self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)

    def artifact(self, name: str) -> bytes | None:
        """Content of an artifact; None if the job has not written it.

        Raises:
            KeyError: `name` is not one of `ARTIFACTS`.
            OSError: the store does not answer.
        """
        if name not in ARTIFACTS:
            raise KeyError(name)
        try:
            return bytes(self._fs.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def metrics(self, after_step: int = -1) -> list[dict[str, Any]]:
        """One record per step beyond `after_step`, by step.

        After a resume, steps come again; the record written last wins.

        Raises:
            OSError: the store does not answer.
        """
        steps: dict[int, dict[str, Any]] = {}
        for part in sorted(self._fs.glob(f"{self._root}/metrics/*.jsonl")):
            try:
                text = self._fs.cat_file(part)
            except FileNotFoundError:  # replaced between listing and reading; the next request sees it
                continue
            for line in text.splitlines():
                record = _record(line)
                if record and record.get("time", 0) >= steps.get(record["step"], record).get("time", 0):
                    steps[record["step"]] = record
        return [steps[step] for step in sorted(steps) if step > after_step]


def _record(line: bytes) -> dict[str, Any] | None:
    """A metrics line; None if it is torn (it is being written). What is not finite becomes null."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def _s3_options(storage: Storage) -> dict[str, Any]:
    endpoint = storage.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = storage.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return {
        "anon": storage.anonymous,
        "endpoint_url": endpoint,
        "client_kwargs": {"region_name": region} if region else {},
    }
