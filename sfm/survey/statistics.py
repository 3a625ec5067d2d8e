"""Amplitude statistics of a survey: where to clip, and what to scale by."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sfm.survey.clients import SurveyError
from sfm.survey.mdio import Survey
from sfm.survey.reader import WindowReader, chunk_region

_MOST_VOXELS = 2**24
"""Voxels that an estimate holds at most: 64 MiB of float32."""


@dataclass(frozen=True)
class Statistics:
    """What amplitudes of a survey are clipped to and scaled by, in the survey's own unit."""

    low: float
    """Amplitudes below are clipped to this."""
    high: float
    """Amplitudes above are clipped to this."""
    mean: float
    """Mean after clipping."""
    std: float
    """Standard deviation after clipping."""
    live_share: float
    """Share of voxels with data (0 to 1): on traces that exist, finite, and not part of a trace of zeros."""

    def to_json(self) -> dict[str, float]:
        """The fields as plain numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Statistics:
        """The opposite of :meth:`to_json`."""
        return cls(**{name: float(value) for name, value in data.items()})


def estimate(
    survey: Survey,
    clip: float = 99.5,
    seed: int = 0,
    max_chunks: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> Statistics:
    """Estimate statistics from live, finite voxels of up to `max_chunks` chunks drawn by `seed`.

    A survey of no more chunks, and of no more than 2**24 voxels, is measured in full.

    Args:
        clip: percent of the voxels, in the centre of their distribution, that clipping leaves alone.
        progress: called with (chunks done, chunks in all).

    Raises:
        SurveyError: no voxel is live, or all are equal; or a chunk cannot be read.
    """
    chosen = _choose(survey, seed, max_chunks)
    values, with_data = _gather(survey, chosen, seed, progress)
    if not values.size:
        raise SurveyError(
            f"{survey.url}: no live trace holds a finite amplitude in {len(chosen)} chunks; the survey is empty"
        )
    tail = (100 - clip) / 2
    low, high = (float(v) for v in np.percentile(values, [tail, 100 - tail]))
    np.clip(values, low, high, out=values)
    mean, std = float(values.mean(dtype=np.float64)), float(values.std(dtype=np.float64))
    if not std > 1e-6 * max(abs(low), abs(high)):
        raise SurveyError(
            f"{survey.url}: the amplitudes within the central {clip:g} percent are all {mean:g}; "
            "there is nothing to learn from"
        )
    return Statistics(low, high, mean, std, float(survey.trace_mask.mean()) * with_data)


def _choose(survey: Survey, seed: int, most: int) -> list[tuple[int, int, int]]:
    """Chunks with live traces, at most `most` of them, in storage order."""
    counts = [math.ceil(n / c) for n, c in zip(survey.shape, survey.chunks, strict=True)]
    columns = []
    for i, x in itertools.product(range(counts[0]), range(counts[1])):
        rows, lines, _ = chunk_region(survey, (i, x, 0))
        if survey.trace_mask[rows, lines].any():
            columns.append((i, x))
    total = len(columns) * counts[2]
    if total <= most:
        picks = range(total)
    else:
        picks = sorted(np.random.default_rng(seed).choice(total, most, replace=False))  # type: ignore[assignment]
    return [(*columns[p // counts[2]], int(p % counts[2])) for p in picks]


def _gather(
    survey: Survey,
    chunks: list[tuple[int, int, int]],
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[np.ndarray, float]:
    """Voxels with data of `chunks`, float32, each chunk thinned to its share of the budget; and which share of the
    voxels under the trace mask has data."""
    if not chunks:
        return np.empty(0, np.float32), 0.0
    share = _MOST_VOXELS // len(chunks)
    reader = WindowReader(survey, keep=False)

    def voxels(number: int) -> tuple[np.ndarray, int, int]:
        index = chunks[number]
        region = chunk_region(survey, index)
        origin, shape = tuple(part.start for part in region), tuple(part.stop - part.start for part in region)
        values = reader.read(origin, shape)[survey.trace_mask[region[:2]]]
        seen = values.size
        values = values[np.isfinite(values)]
        full = values.size
        if values.size > share:
            values = values[np.random.default_rng([seed, number]).integers(0, values.size, share)]
        return values, full, seen

    parts, full, seen = [], 0, 0
    with ThreadPoolExecutor(4, thread_name_prefix="statistics") as threads:
        for done, (part, of_part, seen_in_part) in enumerate(threads.map(voxels, range(len(chunks))), start=1):
            parts.append(part)
            full, seen = full + of_part, seen + seen_in_part
            if progress is not None:
                progress(done, len(chunks))
    return np.concatenate(parts), full / max(seen, 1)
