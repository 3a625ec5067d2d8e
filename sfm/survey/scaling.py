"""From stored amplitudes to a window: converted, clipped, scaled, NaN where there is no data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from sfm.survey.statistics import Statistics

WindowType = Literal["float32", "float16", "bfloat16"]
DEAD_SAMPLES = 16  # zeros in a row that a live trace does not hold
_TILE = 2**16  # values that are worked on at a time: 256 KiB of float32 stay in the cache of a core

_STORAGE: dict[str, type[np.generic]] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def storage_type(name: WindowType) -> np.dtype:
    """The numpy type of a window; bfloat16, which numpy does not know, is kept as its bits in uint16."""
    return np.dtype(_STORAGE[name])


def no_data(name: WindowType) -> np.generic:
    """NaN, as windows of this type keep it."""
    return np.uint16(0x7FC0) if name == "bfloat16" else storage_type(name).type(np.nan)


def scale_into(target: np.ndarray, values: np.ndarray, statistics: Statistics | None, kind: WindowType) -> None:
    """Write `values`, clipped to and scaled by `statistics`, into `target`; what is not finite becomes NaN.

    Args:
        target: [I, X, T] of `storage_type(kind)`; may be a view.
        values: [I, X, T] of any real type and byte order, as stored.
        statistics: None leaves finite values as they are.
    """
    rows = max(1, _TILE // max(1, values[0].size))
    for first in range(0, len(values), rows):
        _scale_tile(target[first : first + rows], values[first : first + rows], statistics, kind)


def _scale_tile(target: np.ndarray, values: np.ndarray, statistics: Statistics | None, kind: WindowType) -> None:
    if statistics is None and kind == "float32" and values.dtype == np.float32:
        np.copyto(target, values)
        finite = np.isfinite(values)  # asked of what lies closer together
        if not finite.all():
            target[~finite] = np.nan
        return
    with np.errstate(over="ignore", invalid="ignore"):  # beyond float32 becomes infinite, thus no data
        tile = values.astype(np.float32)
        finite = np.isfinite(tile)  # before clipping, which would turn infinity into an amplitude
        if statistics is not None:
            np.clip(tile, np.float32(statistics.low), np.float32(statistics.high), out=tile)
            tile -= np.float32(statistics.mean)
            tile /= np.float32(statistics.std)
    if not finite.all():
        tile[~finite] = np.nan
    if kind == "bfloat16":
        target[...] = bfloat16_bits(tile)
        return
    with np.errstate(over="ignore"):
        target[...] = tile
    if kind == "float16" and statistics is None:  # unscaled, they may not fit
        target[np.isinf(target)] = np.nan


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """The bits of float32 `values` rounded to bfloat16 (to nearest, ties to even), as uint16. NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def holds_data(values: np.ndarray) -> np.ndarray | None:
    """Which traces of [I, X, T] hold anything but zeros, bool [I, X]; None where all do."""
    if (values[:, :, 0] != 0).all():  # the usual case, and quickly seen
        return None
    found: np.ndarray = (values != 0).any(axis=2)
    return found
