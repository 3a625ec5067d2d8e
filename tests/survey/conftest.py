"""Surveys to test with: small stores written by hand, and real ones where they lie beside the repository."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import zarr

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def real(name: str) -> Path:
    """A real file for tests, which skip where it is absent."""
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"real seismic data is not here: {path} does not exist")
    return path


def said_by_a_child(work: Callable[[], object]) -> str:
    """What `work` fails with in a forked child, "nothing" if it does not, and "it hangs" if that takes half a minute."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        words = "nothing"
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the parent looks at it
            words = str(error)
        os.write(into, words.encode())
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as pipe:
        ready, _, _ = select.select([pipe], [], [], 30)
        if not ready:
            os.kill(child, signal.SIGKILL)
        said = pipe.read()
    os.waitpid(child, 0)
    return said if ready else "it hangs"


@contextlib.contextmanager
def few_threads(count: int, *names: str) -> Iterator[None]:
    """So many threads whose names begin like this can be started, and no more."""
    start, left = threading.Thread.start, [count]

    def scarce(thread: threading.Thread) -> None:
        if thread.name.startswith(names):
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", scarce)
        yield


def write_v1(
    path: Path,
    values: np.ndarray,
    mask: np.ndarray | None = None,
    chunks: Sequence[int] = (4, 5, 6),
    zarr_format: int = 3,
    attributes: dict | None = None,
    names: Sequence[str] = ("inline", "crossline", "time"),
    coordinates: bool = True,
    **encoding: object,
) -> str:
    """Write an MDIO v1 store of `values` with dead traces stored as NaN; returns its path. `encoding` says how Zarr
    stores amplitudes: compressors, filters, shards ..."""
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    base = {"surveyType": "3D", "gatherType": "stacked", "defaultVariableName": "amplitude"}
    group.attrs.update({"apiVersion": "1.1.3", "name": "PostStack3DTime", "attributes": {**base, **(attributes or {})}})
    values = np.array(values)
    if mask is not None and values.dtype.kind == "f":
        values[~mask] = np.nan
    fill = np.nan if values.dtype.kind == "f" else 0

    def add(name: str, data: np.ndarray, dims: Sequence[str], **options: object) -> zarr.Array:
        keywords = {"dimension_names": list(dims)} if zarr_format == 3 else {}
        array = group.create_array(name, shape=data.shape, dtype=data.dtype, **keywords, **options)
        if zarr_format == 2:
            array.attrs["_ARRAY_DIMENSIONS"] = list(dims)
        array[...] = data
        return array

    sized = tuple(min(c, n) for c, n in zip(chunks, values.shape, strict=True))
    amplitude = add("amplitude", values, names, chunks=sized, fill_value=fill, **encoding)
    amplitude.attrs["statsV1"] = json.dumps({"count": 4, "sum": 8.0, "sumSquares": 20.0, "min": 0.0, "max": 3.0})
    if mask is not None:
        add("trace_mask", mask, names[:2])
    for axis, name in enumerate(names):
        if coordinates:
            add(name, np.arange(100, 100 + 2 * values.shape[axis], 2, dtype=np.int32), [name])
    return str(path)


def write_v0(
    path: Path, values: np.ndarray, mask: np.ndarray, chunks: Sequence[int] = (4, 5, 6), **encoding: object
) -> str:
    """Write an MDIO v0 store of `values` with dead traces stored as 0; returns its path."""
    group = zarr.open_group(path, mode="w", zarr_format=2)
    names = ("inline", "crossline", "sample")
    dimensions = [{"name": n, "coords": list(range(s))} for n, s in zip(names, values.shape, strict=True)]
    group.attrs.update({"api_version": "0.9.3", "dimension": dimensions, "mean": 0.5, "std": 2.0})
    stored = np.where(mask[..., None], values, 0).astype(values.dtype)
    data = group.create_array(
        "data/chunked_012", shape=values.shape, chunks=tuple(chunks), dtype=values.dtype, fill_value=0, **encoding
    )
    data[...] = stored
    live = group.create_array("metadata/live_mask", shape=mask.shape, dtype=bool, fill_value=False)
    live[...] = mask
    return str(path)


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Unpacks a real MDIO store by the name of its archive; returns its folder."""
    found: dict[str, Path] = {}

    def unpack(name: str) -> Path:
        if name not in found:
            folder = tmp_path_factory.mktemp("real")
            with tarfile.open(real(name)) as archive:
                archive.extractall(folder, filter="data")
            (found[name],) = folder.iterdir()
        return found[name]

    return unpack
