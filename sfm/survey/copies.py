"""Copies of a survey in other chunks: which hold the same values, and which costs a window least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr

_BOX, _BOXES = 16, 5  # positions along an axis; boxes in which values are compared

LOSSLESS = {
    "blosc", "bytes", "bz2", "crc32", "crc32c", "endian", "gzip", "lz4", "lzma", "pcodec", "sharding_indexed", "shuffle",
    "transpose", "zlib", "zstd",
}  # fmt: skip
"""Zarr codecs that give back the very values they were given; of others, that is not taken for granted."""


@dataclass(frozen=True)
class Copy:
    """An array that lies beside the amplitudes of a survey, to hold the same in other chunks."""

    name: str
    chunks: tuple[int, ...]
    reason: str
    """Why it is not read in place of the amplitudes; empty where it may be."""


def difference(original: zarr.Array, copy: zarr.Array) -> str:
    """Why `copy` may hold other values than `original`; empty where nothing speaks against it."""
    if copy.shape != original.shape:
        return f"its shape is {' x '.join(map(str, copy.shape))}"
    names, others = dimension_names(original), dimension_names(copy)
    if names and others and names != others:
        return f"its dimensions are {', '.join(others)}"
    if copy.dtype != original.dtype:
        return f"its numbers are {copy.dtype}"
    for array, whose in ((copy, "it is"), (original, "the amplitudes are")):
        lossy = [name for name in codec_names(array) if name not in LOSSLESS]
        if lossy:
            return f"{whose} stored by {', '.join(lossy)}, which may change values"
    fill, other = (0 if array.fill_value is None else array.fill_value for array in (original, copy))
    if fill != other and not (fill != fill and other != other):  # NaN is not equal to itself
        return f"chunks that are not stored mean {other} in it, not {fill}"
    return ""


def agree(original: zarr.Array, copy: zarr.Array) -> bool:
    """Whether both hold the same values in boxes of up to 16 positions a side: the first, the last and some between.

    A copy whose making was broken off, or that was not made again when the amplitudes were, is found out in most cases.
    """
    rooms = [max(n - _BOX, 0) for n in original.shape]
    # Along each axis in another order, so that no two boxes share a plane.
    places = [
        tuple(room * ((k * step) % _BOXES) // (_BOXES - 1) for room, step in zip(rooms, (1, 3, 2), strict=True))
        for k in range(_BOXES)
    ]

    def same(origin: tuple[int, ...]) -> bool:
        box = tuple(slice(first, first + _BOX) for first in origin)
        one, two = np.asarray(original[box]), np.asarray(copy[box])
        return bool(np.array_equal(one, two, equal_nan=one.dtype.kind == "f"))

    with ThreadPoolExecutor(_BOXES, thread_name_prefix="open") as threads:
        return all(threads.map(same, places))


def dimension_names(array: zarr.Array) -> list[str]:
    """What an array calls its dimensions; empty where it says nothing."""
    names: Any = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS")
    return [str(name) for name in names or ()]


def codec_names(array: zarr.Array) -> list[str]:
    """Names of the codecs of an array, those within shards included, as numcodecs calls them."""
    metadata = array.metadata
    if metadata.zarr_format == 2:
        codecs = [*(metadata.filters or ()), *([metadata.compressor] if metadata.compressor is not None else [])]
        return [str(codec.codec_id) for codec in codecs]
    return _names([codec.to_dict() for codec in metadata.codecs])


def _names(codecs: Sequence[object]) -> list[str]:
    found = []
    for codec in codecs:
        assert isinstance(codec, dict)
        found.append(str(codec["name"]).removeprefix("numcodecs."))
        settings = codec.get("configuration") or {}
        found += _names([*settings.get("codecs", ()), *settings.get("index_codecs", ())])
    return found


def chunks_met(size: int, window: int, chunk: int) -> float:
    """Chunks that a window meets along an axis, on the average over all its origins.

    Args:
        size: positions along the axis.
        window: of them in the window; cut down to `size`.
        chunk: of them in a chunk.
    """
    window = min(window, size)
    origins = size - window + 1
    # A window meets 1 chunk, and one more for each border between chunks that lies within it. The border before
    # position b lies within the windows that begin at b - window + 1 ... b - 1, as far as those exist.
    within = 0
    for border in range(chunk, size, chunk):
        first, last = max(border - window + 1, 0), min(border - 1, size - window)
        within += max(last - first + 1, 0)
    return 1 + within / origins


def expected_bytes(shape: Sequence[int], window: Sequence[int], chunks: Sequence[int], itemsize: int) -> float:
    """Bytes of the chunks that a window at random meets, decoded, on the average.

    Args:
        shape: of the survey.
        itemsize: bytes of a voxel.
    """
    met = math.prod(chunks_met(n, w, c) for n, w, c in zip(shape, window, chunks, strict=True))
    return met * math.prod(chunks) * itemsize


def cheapest(shape: Sequence[int], window: Sequence[int], chunks: Sequence[Sequence[int]], itemsize: int) -> int:
    """Which of several `chunks` of the same array costs a window at random fewest decoded bytes; the first of equals."""
    return min(range(len(chunks)), key=lambda n: (expected_bytes(shape, window, chunks[n], itemsize), n))
