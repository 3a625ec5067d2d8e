"""Amplitude statistics of a survey: where to clip, and what to scale by."""

from __future__ import annotations

import contextlib
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
from sfm.survey.transfers import Transfers

_MOST_VOXELS = 2**24
"""Voxels that an estimate holds at most: 64 MiB of float32."""
_MEMORY = 2**28
"""Bytes that the chunks an estimate works on at one time may take."""
PERCENTS = (0.1, 0.25, 1.0, 5.0, 25.0, 50.0, 75.0, 95.0, 99.0, 99.75, 99.9)
FEW_CHUNKS = 8
"""Chunks of a larger survey that say too little of its mean and standard deviation."""
STD_FACTOR = 1.3
"""By how much a stored standard deviation may differ from the measured one: samples differ from the whole."""
MEAN_SHIFT = 0.25
"""Measured standard deviations that a stored mean may be away from the measured one."""
EXTREME_SHIFT = 0.05
"""Share of the central 99.5 % that amplitudes may exceed a stored extreme by: lossy compression moves them."""


class EmptyError(SurveyError):
    """A survey holds nothing to learn from."""


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


@dataclass(frozen=True)
class Distribution:
    """How the amplitudes of a survey are distributed, as far as they were read; in the survey's own unit.

    Of voxels with data. Zeros are left out of `mean` and `std`, as MDIO leaves them out of what it stores.
    """

    percentiles: dict[float, float]
    """Percent of the voxels (`PERCENTS`), and the amplitude that so many lie below."""
    minimum: float
    maximum: float
    mean: float
    """Mean, nothing clipped."""
    std: float
    """Standard deviation, nothing clipped."""
    zeros: float
    """Share of zeros among them (0 to 1)."""
    with_data: float
    """Share of the voxels on live traces that hold data (0 to 1): finite, and not part of a trace of zeros."""
    live_traces: float
    """Share of traces that exist, by the trace mask (0 to 1)."""
    live_voxels: int
    """Voxels on those traces, in all of the survey."""
    voxels: int
    """Voxels that were read and hold data."""
    chunks: int
    """Chunks that were read."""
    chunks_in_all: int
    """Chunks with live traces."""

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data."""
        return {**asdict(self), "percentiles": {f"{percent:g}": value for percent, value in self.percentiles.items()}}


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
        EmptyError: no voxel is live, or all are equal.
        SurveyError: a chunk cannot be read.
    """
    return examine(survey, clip, seed, max_chunks, progress)[0]


def examine(
    survey: Survey,
    clip: float = 99.5,
    seed: int = 0,
    max_chunks: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Statistics, Distribution]:
    """What :func:`estimate` does, and how the same amplitudes are distributed.

    Raises:
        SurveyError: as :func:`estimate` does (EmptyError among them).
    """
    chosen, in_all = _choose(survey, seed, max_chunks)
    values, sums = _gather(survey, chosen, seed, progress)
    if not values.size:
        raise EmptyError(
            f"{survey.url}: no live trace holds a finite amplitude in {len(chosen)} chunks; the survey is empty"
        )
    tail = (100 - clip) / 2
    low, high, *percentiles = (float(v) for v in np.percentile(values, [tail, 100 - tail, *PERCENTS]))
    np.clip(values, low, high, out=values)
    mean, std = float(values.mean(dtype=np.float64)), float(values.std(dtype=np.float64))
    if not std > 1e-6 * max(abs(low), abs(high)):
        raise EmptyError(
            f"{survey.url}: the amplitudes within the central {clip:g} percent are all {mean:g}; "
            "there is nothing to learn from"
        )
    live = float(survey.trace_mask.mean())
    distribution = Distribution(
        percentiles=dict(zip(PERCENTS, percentiles, strict=True)),
        minimum=sums.low,
        maximum=sums.high,
        mean=sums.mean,
        std=sums.std,
        zeros=1 - sums.count / sums.full,
        with_data=sums.full / sums.seen,
        live_traces=live,
        live_voxels=int(survey.trace_mask.sum()) * survey.shape[2],
        voxels=sums.full,
        chunks=len(chosen),
        chunks_in_all=in_all,
    )
    return Statistics(low, high, mean, std, live * sums.full / max(sums.seen, 1)), distribution


def disagreements(found: Distribution, stored: dict[str, Any] | None) -> list[str]:
    """Where the statistics that a store states cannot be those of its amplitudes, in sentences.

    Only what can be told from a sample is compared. What MDIO stores is known to be wrong in places: 1.0.0 takes
    the least of the maxima, releases before 1.0.4 count zeros, and all of them start minimum and maximum at 0.

    Args:
        stored: count, min, max, mean, std, as far as they are there.
    """
    stored = {name: float(value) for name, value in (stored or {}).items() if value is not None}
    enough = found.chunks >= min(FEW_CHUNKS, found.chunks_in_all)
    said = []
    middle = found.percentiles[99.75] - found.percentiles[0.25]
    for name, seen, beyond, sign in (
        ("max", found.maximum, found.percentiles[99.75], 1),
        ("min", found.minimum, found.percentiles[0.25], -1),
    ):
        if name not in stored:
            continue
        word, end = ("above", "highest") if sign > 0 else ("below", "lowest")
        if sign * (seen - stored[name]) > EXTREME_SHIFT * middle:
            share = "more than 0.25 %" if sign * (beyond - stored[name]) > 0 else "some"
            said.append(
                f"stored {name} {stored[name]:.5g} is wrong: {share} of the amplitudes lie {word} it, {end} {seen:.5g}"
            )
        elif stored[name] == 0 and sign * seen < 0:
            said.append(f"stored {name} 0 is where MDIO starts to count: the {end} amplitude read is {seen:.5g}")
    if "std" in stored and enough and not 1 / STD_FACTOR <= stored["std"] / (found.std or math.nan) <= STD_FACTOR:
        said.append(
            f"stored std {stored['std']:.5g} is {_times(stored['std'], found.std)} the measured {found.std:.5g}"
        )
    if "mean" in stored and enough and abs(stored["mean"] - found.mean) > MEAN_SHIFT * found.std:
        away = abs(stored["mean"] - found.mean) / (found.std or math.nan)
        said.append(
            f"stored mean {stored['mean']:.5g} is {away:.2g} standard deviations away from the measured {found.mean:.5g}"
        )
    if "count" in stored:
        said += _count(found, stored["count"])
    return said


def _count(found: Distribution, count: float) -> list[str]:
    live, share = found.live_voxels, found.with_data * (1 - found.zeros)
    if count > live:
        return [f"stored count {count:,.0f} is more than the {live:,} voxels on live traces: dead ones were counted"]
    if share < 0.95 and count > 0.99 * live:
        return [f"stored count {count:,.0f} includes zeros or NaN, which are {1 - share:.0%} of the live voxels read"]
    if count < 0.5 * live * share:
        return [f"stored count {count:,.0f} covers {count / live:.2g} of the {live:,} voxels on live traces"]
    return []


def _times(value: float, of: float) -> str:
    return f"{value / of:.2g} times" if of else "not"


def _choose(survey: Survey, seed: int, most: int) -> tuple[list[tuple[int, int, int]], int]:
    """Chunks with live traces, at most `most` of them, in storage order; and how many there are."""
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
    return [(*columns[p // counts[2]], int(p % counts[2])) for p in picks], total


@dataclass
class _Sums:
    """Of voxels under the trace mask; joined chunk by chunk, in float64."""

    seen: int = 0
    full: int = 0
    """Those with data."""
    low: float = math.inf
    high: float = -math.inf
    count: int = 0
    """Those with data other than 0, and their moments."""
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared differences from the mean."""

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / max(self.count, 1))

    def add(self, other: _Sums) -> None:
        """Chan et al. (1979): no difference of large numbers, as sums of squares would need."""
        self.seen += other.seen
        self.full += other.full
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        if not other.count:
            return
        count, shift = self.count + other.count, other.mean - self.mean
        self.squares += other.squares + shift**2 * self.count * other.count / count
        self.mean += shift * other.count / count
        self.count = count


def _sums(values: np.ndarray, seen: int) -> _Sums:
    """Of finite `values` among `seen` voxels."""
    if not values.size:
        return _Sums(seen)
    count = int(np.count_nonzero(values))
    # Zeros add nothing to either sum: the moments of the rest follow without a copy of it.
    mean = float(values.sum(dtype=np.float64)) / max(count, 1)
    squares = float(np.square(values - np.float32(mean), dtype=np.float64).sum())
    shift = float(np.float64(np.float32(mean)))
    squares -= (values.size - count) * shift**2 + count * (shift - mean) ** 2
    return _Sums(seen, values.size, float(values.min()), float(values.max()), count, mean, max(squares, 0.0))


def _gather(
    survey: Survey,
    chunks: list[tuple[int, int, int]],
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[np.ndarray, _Sums]:
    """Voxels with data of `chunks`, float32, each chunk thinned to its share of the budget; and sums over all of them."""
    if not chunks:
        return np.empty(0, np.float32), _Sums()
    share = _MOST_VOXELS // len(chunks)
    threads = max(1, min(16, _MEMORY // (24 * math.prod(survey.chunks))))
    reader = WindowReader(survey, transfers=Transfers(decoders=min(4, threads)), keep=False)

    def voxels(number: int) -> tuple[np.ndarray, _Sums]:
        index = chunks[number]
        region = chunk_region(survey, index)
        origin, shape = tuple(part.start for part in region), tuple(part.stop - part.start for part in region)
        values = reader.read(origin, shape)[survey.trace_mask[region[:2]]]
        seen = values.size
        values = values[np.isfinite(values)]
        sums = _sums(values, seen)
        if values.size > share:
            values = values[np.random.default_rng([seed, number]).integers(0, values.size, share)]
        return values, sums

    parts, total = [], _Sums()
    with contextlib.closing(reader.transfers), ThreadPoolExecutor(threads, thread_name_prefix="statistics") as pool:
        for done, (part, sums) in enumerate(pool.map(voxels, range(len(chunks))), start=1):
            parts.append(part)
            total.add(sums)
            if progress is not None:
                progress(done, len(chunks))
    return np.concatenate(parts), total
