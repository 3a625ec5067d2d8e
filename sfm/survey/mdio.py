"""One survey: a 3D post-stack MDIO store, v0 or v1, Zarr v2 or v3, seen as one array with axes and a trace mask."""

from __future__ import annotations

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import zarr

from sfm.spec import Storage
from sfm.survey.clients import SurveyError
from sfm.survey.copies import Copy, agree, cheapest, difference, dimension_names
from sfm.survey.failures import is_passing, persist
from sfm.survey.layout import Layout
from sfm.survey.objects import Objects, objects_at
from sfm.survey.pacing import Backoff
from sfm.survey.store import explain, not_mdio, open_group, place

_DEFAULT_STORAGE = Storage()


@dataclass(frozen=True, eq=False)
class Axis:
    """One dimension of a survey."""

    name: str
    """As the store calls it: inline, crossline, time, depth, sample ..."""
    unit: str
    """Unit of the coordinates, empty where none is known."""
    coordinates: np.ndarray
    """Coordinate of every index, [n]."""


@dataclass(frozen=True, eq=False)
class Survey:
    """A survey opened for reading. Nothing but its metadata and trace mask is in memory."""

    url: str
    version: Literal["v0", "v1"]
    """Generation of the MDIO format."""
    array: zarr.Array
    """Amplitudes as stored, (inline, crossline, sample); or the copy of them that suits a window best."""
    amplitudes: zarr.Array
    """The amplitudes themselves: chunks that a copy lacks are theirs."""
    shape: tuple[int, int, int]
    chunks: tuple[int, int, int]
    dtype: np.dtype
    axes: tuple[Axis, Axis, Axis]
    trace_mask: np.ndarray
    """Which traces exist, bool (inline, crossline); True is live."""
    stored_statistics: dict[str, Any] | None
    """What the store itself says: count, min, max, mean, std ... as far as it does."""
    storage: Storage
    objects: Objects
    """What lies under `url`, as bytes."""
    layout: Layout
    """Where the chunks of `array` lie."""
    identity: str
    """What tells this survey from another that lies, or lay, under the same URL."""


def open_survey(url: str, storage: Storage = _DEFAULT_STORAGE, window: tuple[int, int, int] | None = None) -> Survey:
    """Open the survey at `url`: a local path, or `s3://bucket/key.mdio` and the like (`clients.SCHEMES`).

    Args:
        window: voxels along each axis of the windows that will be read. Where the store holds copies of the amplitudes
            in other chunks (fast access patterns), the one that such windows need fewest bytes of is opened, if it
            holds the same values.

    Raises:
        SurveyError: it is missing, out of reach, not MDIO, or not a 3D post-stack survey.
    """

    def attempt() -> Survey:
        survey, group = _open(url, storage)
        return survey if window is None else _for_windows(survey, group, window)

    # A store that is asked by many at once, as at the start of a job, refuses some of them for a moment.
    return persist(attempt, Backoff(), lambda error: not is_passing(error))


def copies_of(survey: Survey) -> list[Copy]:
    """The copies of the amplitudes that lie in the store beside them, usable or not."""
    return [copy for copy, _ in _copies(*_open(survey.url, survey.storage))]


def _for_windows(survey: Survey, group: zarr.Group, window: tuple[int, int, int]) -> Survey:
    """The survey by the array that serves windows of this shape best."""
    arrays = [survey.array]
    arrays += [array for copy, array in _copies(survey, group) if array is not None and not copy.reason]
    while True:
        best = arrays[cheapest(survey.shape, window, [array.chunks for array in arrays], survey.dtype.itemsize)]
        if best is survey.array:
            return survey
        if agree(survey.array, best):
            break
        arrays = [array for array in arrays if array is not best]  # comparing arrays would read them
    i, x, t = best.chunks
    layout = Layout(best, survey.url)
    identity = f"{survey.identity} {best.path} {best.metadata}"
    return replace(survey, array=best, chunks=(i, x, t), layout=layout, identity=identity)


def _copies(survey: Survey, group: zarr.Group) -> list[tuple[Copy, zarr.Array | None]]:
    # Opened by name, never listed, like all members.
    if survey.version == "v0":
        names = [f"data/chunked_{axes}" for axes in ("01", "02", "12")]
    else:
        names = [f"fast_{axis.name}" for axis in survey.axes]

    def look(name: str) -> tuple[Copy, zarr.Array | None] | None:
        try:
            array = group[name]
            if not isinstance(array, zarr.Array):
                return None
            reason = difference(survey.array, array)
            if not reason:
                Layout(array, survey.url)  # refuses codecs that are not known here
            return Copy(name, array.chunks, reason), array
        except KeyError:
            return None
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a copy, the survey is read without it
            return Copy(name, (), f"it cannot be opened: {str(error).splitlines()[0]}"), None

    with ThreadPoolExecutor(len(names), thread_name_prefix="open") as threads:
        return [found for found in threads.map(look, names) if found is not None]


def _open(url: str, storage: Storage) -> tuple[Survey, zarr.Group]:
    group = open_group(url, storage)
    try:
        if "apiVersion" in group.attrs:
            return _open_v1(url, group, storage), group
        if "api_version" in group.attrs:
            return _open_v0(url, group, storage), group
    except (SurveyError, MemoryError):
        raise
    except (KeyError, FileNotFoundError, TypeError, ValueError) as error:
        raise not_mdio(url, f"it is damaged or incomplete ({error})") from error
    except Exception as error:
        raise explain(error, url, storage) from error
    raise not_mdio(url, "its root attributes state no MDIO version")


def _open_v1(url: str, group: zarr.Group, storage: Storage) -> Survey:
    attributes: dict[str, Any] = _mapping(group.attrs.get("attributes"))
    # Members are opened by name, never listed: newer stores carry a header type that zarr 3.1 cannot parse.
    array = _array(url, group, str(attributes.get("defaultVariableName") or "amplitude"))
    dimensions = _dimension_names(array)
    _refuse_other_than_3d(url, dimensions)
    if attributes.get("surveyType") not in (None, "3D"):
        raise SurveyError(
            f"{url} is a {attributes['surveyType']} {attributes.get('gatherType', '')} survey over "
            f"({', '.join(dimensions)}); only 3D post-stack surveys are read"
        )
    members = list(zip(dimensions, array.shape, strict=True))
    with ThreadPoolExecutor(4, thread_name_prefix="open") as threads:  # a store far away takes its time for each
        traces = threads.submit(_v1_mask, group)
        axes = tuple(threads.map(lambda member: _v1_axis(group, *member), members))
        mask = traces.result()
    return _survey(url, "v1", group, array, axes, mask, _v1_statistics(array), storage)


def _open_v0(url: str, group: zarr.Group, storage: Storage) -> Survey:
    dimensions: Any = group.attrs["dimension"]
    names = [d["name"] for d in dimensions]
    _refuse_other_than_3d(url, names)
    # The suffix names the chunked axes; _01, _12 ... may lie beside it as copies for faster slicing.
    array = _array(url, group, "data/chunked_012")
    axes = tuple(_axis(d["name"], _unit(d["name"], {}), d["coords"], len(d["coords"])) for d in dimensions)
    mask = np.asarray(_array(url, group, "metadata/live_mask")[:], bool)
    stored = {k: group.attrs[k] for k in ("mean", "std", "rms", "min", "max") if k in group.attrs}
    return _survey(url, "v0", group, array, axes, mask, stored or None, storage)


def _survey(
    url: str,
    version: Literal["v0", "v1"],
    group: zarr.Group,
    array: zarr.Array,
    axes: tuple[Axis, ...],
    mask: np.ndarray | None,
    statistics: dict[str, Any] | None,
    storage: Storage,
) -> Survey:
    if array.ndim != len(axes):
        raise not_mdio(url, f"'{array.path}' has {array.ndim} dimensions, its survey {len(axes)}")
    inlines, crosslines, samples = array.shape
    if array.dtype.kind not in "fiu":
        raise SurveyError(f"{url}: amplitudes are stored as {array.dtype}; only real numbers are read")
    mask = np.ones((inlines, crosslines), bool) if mask is None else mask
    if mask.shape != (inlines, crosslines):
        raise not_mdio(url, f"its trace mask has shape {mask.shape}, its traces {(inlines, crosslines)}")
    for axis, size in zip(axes, array.shape, strict=True):
        if len(axis.coordinates) != size:
            raise not_mdio(url, f"axis {axis.name} has {size} positions but {len(axis.coordinates)} coordinates")
    first, second, third = axes
    chunk_i, chunk_x, chunk_t = array.chunks
    return Survey(
        url=url,
        version=version,
        array=array,
        amplitudes=array,
        shape=(inlines, crosslines, samples),
        chunks=(chunk_i, chunk_x, chunk_t),
        dtype=array.dtype,
        axes=(first, second, third),
        trace_mask=mask,
        stored_statistics=statistics,
        storage=storage,
        objects=objects_at(url, storage),
        layout=Layout(array, url),
        identity=f"{url} {place(url, storage)} {sorted(group.attrs.items())} {array.metadata}",
    )


def _array(url: str, group: zarr.Group, name: str) -> zarr.Array:
    try:
        found = group[name]
    except KeyError:
        raise not_mdio(url, f"it has no array '{name}'") from None
    if not isinstance(found, zarr.Array):
        raise not_mdio(url, f"'{name}' is no array")
    return found


def _refuse_other_than_3d(url: str, dimensions: list[str]) -> None:
    if len(dimensions) == 3:
        return
    kind = "a pre-stack survey" if len(dimensions) > 3 else "a 2D line"
    raise SurveyError(
        f"{url} is {kind} with {len(dimensions)} dimensions ({', '.join(dimensions)}); "
        "only 3D post-stack surveys (inline, crossline, time or depth) are read"
    )


def _dimension_names(array: zarr.Array) -> list[str]:
    return dimension_names(array) or [f"dimension_{i}" for i in range(array.ndim)]


def _v1_mask(group: zarr.Group) -> np.ndarray | None:
    try:
        mask: Any = group["trace_mask"]
    except KeyError:
        return None
    return np.asarray(mask[:], bool)


def _v1_axis(group: zarr.Group, name: str, size: int) -> Axis:
    try:
        coordinate: Any = group[name]
    except KeyError:
        return Axis(name, _unit(name, {}), np.arange(size))
    return _axis(name, _unit(name, _mapping(coordinate.attrs.get("unitsV1"))), coordinate[...], size)


def _axis(name: str, unit: str, coordinates: Any, size: int) -> Axis:
    """An axis; by plain indices where its coordinates are no finite numbers along it. Windows do not need them."""
    values = np.asarray(coordinates)
    if values.ndim != 1 or values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        return Axis(name, "", np.arange(size))
    return Axis(name, unit, values)


def _unit(name: str, stated: dict[str, Any]) -> str:
    for value in stated.values():  # {"time": "ms"}, {"length": "m"}
        if isinstance(value, str):
            return value
    return "ms" if name == "time" else ""  # MDIO counts time in milliseconds, as SEG-Y ingestion does


def _v1_statistics(array: zarr.Array) -> dict[str, Any] | None:
    stored = _mapping(array.attrs.get("statsV1"))
    count, total, squares = (stored.get(k) for k in ("count", "sum", "sumSquares"))
    if not all(isinstance(value, (int, float)) for value in (count, total, squares)) or not count:
        return None
    mean = total / count
    return {
        "count": count,
        "mean": mean,
        "std": max(squares / count - mean**2, 0.0) ** 0.5,
        "min": stored.get("min"),
        "max": stored.get("max"),
    }


def _mapping(value: Any) -> dict[str, Any]:
    """A JSON object that may have been stored as a string of JSON, as statistics are."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return {}
    return dict(value) if isinstance(value, dict) else {}


# MDIO itself stores ZFP by this name; who reads its surveys can do nothing about it.
warnings.filterwarnings("ignore", message="Numcodecs codecs are not in the Zarr version 3 specification")
