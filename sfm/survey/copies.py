"""Copies of a survey in other chunks, and which of them costs a window least. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


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
