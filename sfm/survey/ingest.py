"""SEG-Y to MDIO, through multidimio, after checks that cost seconds instead of hours."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sfm.spec import Storage
from sfm.survey import segy
from sfm.survey.clients import SurveyError, is_local, local_path, object_path, storage_options
from sfm.survey.mdio import Survey, open_survey
from sfm.survey.store import explain

_MARKS = ("zarr.json", ".zgroup")
_DEFAULT_STORAGE = Storage()


@dataclass(frozen=True)
class HeaderBytes:
    """Where trace headers hold what a survey is indexed by: first byte of each int32, counted from 1."""

    inline: int = 189
    crossline: int = 193
    x: int = 181
    y: int = 185

    def __post_init__(self) -> None:
        for name, byte in vars(self).items():
            if not 1 <= byte <= segy.TRACE_HEADER - 3:
                raise SurveyError(f"{name} byte {byte} lies outside a trace header; an int32 starts at byte 1 to 237")


@dataclass(frozen=True)
class Ingested:
    """What an ingestion made."""

    survey: Survey
    traces: int
    seconds: float
    notes: tuple[str, ...]
    """What a user should know though it stopped nothing."""


def ingest(
    source: str | Path,
    url: str,
    *,
    where: HeaderBytes | None = None,
    chunks: tuple[int, int, int] = (128, 128, 128),
    domain: Literal["time", "depth"] = "time",
    overwrite: bool = False,
    storage: Storage = _DEFAULT_STORAGE,
) -> Ingested:
    """Write the 3D post-stack survey in SEG-Y `source` to `url` (`s3://bucket/key.mdio` or a local path) as MDIO v1.

    Runs in processes of its own (spawned: the calling script needs an `if __name__ == "__main__"` guard).
    What a failed run has begun is removed.

    Raises:
        SurveyError: the file is not whole SEG-Y, its lines do not form a grid, the destination exists or refuses.
    """
    began = time.monotonic()
    where = where or HeaderBytes()
    file = segy.inspect(source)
    segy.check_lines(file, where.inline, where.crossline)
    notes = [note for note in (segy.coordinates_advice(file, where.x, where.y),) if note]
    scalar = _coordinate_scalar(file)
    _prepare(url, storage, overwrite)
    try:
        with _quiet():
            _convert(file, url, where, chunks, domain, scalar, storage)
        survey = open_survey(url, storage)
        _true_depths(file, survey, domain, storage)
    except BaseException as error:
        with contextlib.suppress(Exception):
            _remove(url, storage)
        if isinstance(error, SurveyError) or not isinstance(error, Exception):
            raise
        if isinstance(error, (OSError, ConnectionError)):
            raise explain(error, url, storage, action="write") from error
        raise SurveyError(f"{file.path}: multidimio cannot ingest it: {type(error).__name__}: {error}") from error
    return Ingested(open_survey(url, storage), file.traces, time.monotonic() - began, tuple(notes))


def _convert(
    file: segy.SegyFile,
    url: str,
    where: HeaderBytes,
    chunks: tuple[int, int, int],
    domain: Literal["time", "depth"],
    scalar: int,
    storage: Storage,
) -> None:
    # Heavy (numba, dask, xarray), and needed by nothing else.
    from mdio import segy_to_mdio
    from mdio.builder.template_registry import get_template
    from segy.schema import HeaderField, ScalarType
    from segy.standards import get_segy_standard
    from upath import UPath

    from sfm.survey.worker_settings import Overrides

    fields = {"inline": where.inline, "crossline": where.crossline, "cdp_x": where.x, "cdp_y": where.y}
    spec = get_segy_standard(1 if file.extended_headers else 0).customize(
        trace_header_fields=[
            HeaderField(name=name, byte=byte, format=ScalarType.INT32) for name, byte in fields.items()
        ]
    )
    template = get_template(f"PostStack3D{domain.capitalize()}")
    template.full_chunk_shape = chunks
    overrides = Overrides(trace_header={"coordinate_scalar": scalar} if scalar == 1 else {})
    target = UPath(str(local_path(url).absolute())) if is_local(url) else UPath(url, **storage_options(url, storage))
    segy_to_mdio(spec, template, file.path.absolute(), target, overwrite=True, segy_header_overrides=overrides)


def _coordinate_scalar(file: segy.SegyFile) -> int:
    """The scalar of coordinates in the first trace; 0, which many files have, means 1.

    Raises:
        SurveyError: it is none that the standard knows.
    """
    scalar = int(file.header(71, "i2")[0]) or 1
    if abs(scalar) not in (1, 10, 100, 1000, 10000):
        raise SurveyError(
            f"{file.path}: the coordinate scalar (trace header bytes 71-72) is {scalar}; SEG-Y knows 1, 10, 100, 1000 "
            "and 10000, positive or negative; correct the headers"
        )
    return scalar


def _true_depths(file: segy.SegyFile, survey: Survey, domain: str, storage: Storage) -> None:
    """Complete the vertical axis: multidimio starts it at 0, in whole steps, without a unit."""
    import zarr

    delay = file.header(109, "i2")
    values = file.interval * np.arange(file.samples) + (float(delay[0]) if not np.ptp(delay) else 0.0)
    mode: Any = (
        {"mode": "r+"}
        if is_local(survey.url)
        else {"mode": "r+", "storage_options": storage_options(survey.url, storage)}
    )
    group = zarr.open_group(
        str(local_path(survey.url)) if is_local(survey.url) else survey.url, use_consolidated=False, **mode
    )
    axis: Any = group[domain]
    if (values == np.round(values)).all():
        axis[:] = values.astype(axis.dtype)
    else:
        attributes = dict(axis.attrs)
        axis = group.create_array(
            domain, data=values.astype(np.float64), dimension_names=[domain], attributes=attributes, overwrite=True
        )
    if domain == "time":
        axis.attrs["unitsV1"] = {"time": "ms"}


def _prepare(url: str, storage: Storage, overwrite: bool) -> None:
    """See that `url` may be written, and clear what lies there if it is to be overwritten.

    Raises:
        SurveyError: it exists (and is not to be overwritten, or is no Zarr store), or the store refuses.
    """
    files, path = _files(url, storage)
    try:
        bucket = None if is_local(url) else path.split("/", 1)[0]
        if bucket is not None:
            try:
                files.call_s3("head_bucket", Bucket=bucket)  # `exists` takes a refusal for absence
            except FileNotFoundError:
                raise SurveyError(
                    f"{url}: there is no bucket '{bucket}'; make it first, or check the name and the endpoint"
                ) from None
        if files.exists(path):
            if not overwrite:
                raise SurveyError(f"{url} exists; --overwrite replaces it")
            if not any(files.exists(f"{path}/{mark}") for mark in _MARKS):
                raise SurveyError(f"{url} exists and is not an MDIO store; it is left alone")
            files.rm(path, recursive=True)
        # Whether it may be written shows here, not after the headers of all traces were read.
        if is_local(url):
            Path(path).mkdir(parents=True)
        else:
            files.pipe_file(f"{path}/.write-check", b"")
            files.rm_file(f"{path}/.write-check")
    except SurveyError:
        raise
    except Exception as error:
        raise explain(error, url, storage, action="write") from error


def _remove(url: str, storage: Storage) -> None:
    files, path = _files(url, storage)
    if is_local(url):
        shutil.rmtree(path, ignore_errors=True)
    elif files.exists(path):
        files.rm(path, recursive=True)


def _files(url: str, storage: Storage) -> tuple[Any, str]:
    """A file system (fsspec) and the path in it."""
    import fsspec

    if is_local(url):
        return fsspec.filesystem("file"), str(local_path(url).absolute())
    return fsspec.filesystem(
        "s3", skip_instance_cache=True, use_listings_cache=False, **storage_options(url, storage)
    ), object_path(url)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the remarks of libraries about themselves from the user, here and in spawned workers; bound their number."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = {"PYTHONWARNINGS": "ignore", "MDIO__IMPORT__CPU_COUNT": str(count)}
    before = {name: os.environ.get(name) for name in wanted}
    logger = logging.getLogger("mdio")
    level = logger.level
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
