"""Where windows may start, cut into cells: all get their turn, and every origin is as likely as another.

The legal origins along an axis, P of them, are shared out evenly among K strata: stratum k is the stretch
[P k / K, P (k + 1) / K), so where K does not divide P, a position on a border belongs to two strata in part. A cell is a
stratum along each of the three axes. An origin drawn uniformly in each cell is, over all cells, uniform.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sfm.survey.split import Index, Split, cover, tiles

_TRACES_AT_A_TIME = 1 << 18  # of the trace mask, when cells are counted: what bounds the memory it takes


class Strata(NamedTuple):
    """The legal origins along one axis of a stretch of lines, in equal shares.

    Each has a number. Where all are legal, it is the origin itself. Where windows are to meet few chunks, the first
    `free` origins of every `chunk` are legal, and counted from the survey's first line; and so are the lowest and the
    highest of the stretch, which stand for what is counted next: otherwise lines at its ends would be in no window.
    """

    first: int
    """Number of the first one."""
    positions: int
    """P, how many there are."""
    strata: int
    """K, the number of strata."""
    lowest: int
    highest: int
    chunk: int = 1
    free: int = 1

    @classmethod
    def of(cls, first: int, size: int, window: int, chunk: int = 1) -> Strata:
        """Strata no longer than the window, over `size` lines from `first` that hold it.

        Args:
            chunk: lines of a chunk, of which windows are to meet as few as they can; 1 where that does not matter.
        """
        strata, lowest, highest = -(-size // window), first, first + size - window
        free = -(-window // chunk) * chunk - window + 1
        # How many legal origins there are below the lowest, and up to the highest, by chunks alone.
        low, high = (n // chunk * free + min(n % chunk, free) for n in (lowest, highest + 1))
        low -= lowest % chunk >= free
        high += highest % chunk >= free and highest > lowest
        return cls(low, high - low, strata, lowest, highest, chunk, free)

    def at(self, numbers: np.ndarray) -> np.ndarray:
        """The origins with these numbers."""
        return (numbers // self.free * self.chunk + numbers % self.free).clip(self.lowest, self.highest)

    def span(self, start: int, stop: int | None = None) -> range:
        """Numbers of the origins that belong, at least in part, to stratum `start`, or to those up to `stop`."""
        stop = start + 1 if stop is None else stop
        low, high = self.positions * start // self.strata, -(-self.positions * stop // self.strata)
        return range(self.first + low, self.first + high)

    def origins(self, start: int, stop: int | None = None) -> np.ndarray:
        """The origins of :meth:`span`, int64, ascending."""
        span = self.span(start, stop)
        return self.at(np.arange(span.start, span.stop))

    def origin(self, stratum: int, place: int) -> int:
        """The origin at `place` of stratum's P equally likely places."""
        return int(self.at(np.array(self.first + (self.positions * stratum + place) // self.strata)))

    def places(self, stratum: int) -> np.ndarray:
        """How many of those places fall to each origin of the stratum's span."""
        edges = np.arange(len(self.span(stratum)) + 1) + self.positions * stratum // self.strata
        return np.diff((edges * self.strata).clip(self.positions * stratum, self.positions * (stratum + 1)))


class Grid:
    """Places in blocks of inline x crossline x depth, numbered from 0, depth fastest; some columns may not count.

    Args:
        blocks: number of places along inline and crossline of each block.
        depth: number of places along the sample axis.
        best: live traces of each column's best window, block after block, where any are dead.
        live: how many are enough.
    """

    def __init__(
        self, blocks: Sequence[tuple[int, int]], depth: int, best: np.ndarray | None = None, live: Live | None = None
    ) -> None:
        self._across = [x for _, x in blocks]
        self._ends = list(itertools.accumulate(i * x for i, x in blocks))
        self._depth = depth
        self._columns: np.ndarray | None = None
        columns = self._ends[-1] if blocks else 0
        self.left_out = 0
        """How many places do not count."""
        self.most = 1.0
        """Live share of the best window."""
        if best is not None and live is not None:
            self.most = int(best.max()) / live.traces
            usable = np.flatnonzero(best >= live.need)
            if len(usable) < columns:
                self._columns, self.left_out = usable, (columns - len(usable)) * depth
        self.size = columns * depth - self.left_out

    def locate(self, number: int) -> tuple[int, Index]:
        """(block, place in it) of place `number` of `size`."""
        column, t = divmod(number, self._depth)
        if self._columns is not None:
            column = int(self._columns[column])
        block = bisect.bisect_right(self._ends, column)
        i, x = divmod(column - (self._ends[block - 1] if block else 0), self._across[block])
        return block, (i, x, t)


class Live:
    """How many live traces windows hold.

    Args:
        mask: which traces exist, bool [I, X].
        window: traces along inline and crossline that a window has in the survey.
        share: the least part of them that must exist.
    """

    def __init__(self, mask: np.ndarray, window: tuple[int, int], share: float) -> None:
        self._mask, self._window = mask, window
        self.traces = math.prod(window)
        self.need = max(1, math.ceil(round(share * self.traces, 6)))
        """The fewest live traces that are enough."""

    def all(self, rows: np.ndarray, lines: np.ndarray) -> bool:
        """Whether no trace is dead from the first to the last window that starts in `rows` x `lines`, both ascending."""
        return bool(self._under(rows, lines).all())

    def counts(self, rows: np.ndarray, lines: np.ndarray) -> np.ndarray:
        """Live traces of the window that starts at each of `rows` x `lines`, both ascending, [rows, lines]."""
        counts = self._under(rows, lines)
        for axis, (width, starts) in enumerate(zip(self._window, (rows, lines), strict=True)):
            counts = _running_sums(counts, width, axis)
            if len(starts) < counts.shape[axis]:
                counts = counts.take(starts - starts[0], axis)
        return counts

    def best(self, rows: Strata, lines: Strata) -> Iterator[np.ndarray]:
        """The most live traces that a window of each cell has, column after column, in parts."""
        every = lines.origins(0, lines.strata)
        for row in range(rows.strata):
            span = rows.origins(row)
            wide = max(self._window[1], _TRACES_AT_A_TIME // (int(np.ptp(span)) + 1 + self._window[0]))
            step = max(1, wide * lines.strata // (int(np.ptp(every)) + 1))
            for start in range(0, lines.strata, step):
                strata = np.arange(start, min(start + step, lines.strata))
                numbers = lines.span(start, int(strata[-1]) + 1)
                here = every[numbers.start - lines.first : numbers.stop - lines.first]
                under = self._under(span, here)
                if under.all() or not under.any():
                    yield np.full(len(strata), self.traces if under[0, 0] else 0)
                    continue
                offset = numbers.start - lines.first
                low = lines.positions * strata // lines.strata - offset
                high = -(-lines.positions * (strata + 1) // lines.strata) - offset
                most = np.append(self.counts(span, here).max(axis=0), 0)
                yield np.maximum.reduceat(most, np.stack([low, high], axis=1).ravel())[::2]

    def on(self, rows: Sequence[int], lines: Sequence[int]) -> Iterator[np.ndarray]:
        """Live traces of the windows that start at `rows` x `lines`, row after row."""
        first = np.asarray(lines)
        for row in rows:
            ends = np.concatenate([[0], self._mask[row : row + self._window[0]].sum(axis=0, dtype=np.int64).cumsum()])
            yield ends[first + self._window[1]] - ends[first]

    def _under(self, rows: np.ndarray, lines: np.ndarray) -> np.ndarray:
        i, x = self._window
        return self._mask[rows[0] : rows[-1] + i, lines[0] : lines[-1] + x]


class Cells:
    """The cells of one survey's training lines.

    Args:
        blocks: the strata along inline, crossline and sample of each block of training lines.
        live: which windows may be drawn; all where None is given.
    """

    def __init__(self, blocks: Sequence[tuple[Strata, Strata, Strata]], live: Live | None) -> None:
        self._blocks, self._live = blocks, live
        best = None if live is None else np.concatenate([part for i, x, _ in blocks for part in live.best(i, x)])
        self.grid = Grid([(i.strata, x.strata) for i, x, _ in blocks], blocks[0][2].strata, best, live)

    def draw(self, cell: int, across: int, down: int) -> Index:
        """An origin in cell number `cell`, from two times 64 random bits."""
        block, (i, x, t) = self.grid.locate(cell)
        rows, lines, samples = self._blocks[block]
        depth = samples.origin(t, samples.positions * down >> 64)
        if self._live is not None:
            spans = rows.origins(i), lines.origins(x)
            if not self._live.all(*spans):
                enough = self._live.counts(*spans) >= self._live.need
                row, line = _place_among(enough, rows.places(i), lines.places(x), across)
                return int(spans[0][row]), int(spans[1][line]), depth
        row, line = divmod(rows.positions * lines.positions * across >> 64, lines.positions)
        return rows.origin(i, row), lines.origin(x, line), depth


def _place_among(enough: np.ndarray, rows: np.ndarray, lines: np.ndarray, across: int) -> tuple[int, int]:
    """One of the true places of `enough`, [rows, lines], from 64 random bits; each as likely as its `rows` x `lines`."""
    per_row = enough @ lines
    ends = np.cumsum(per_row * rows)
    place = int(ends[-1]) * across >> 64
    row = int(np.searchsorted(ends, place, side="right"))
    place = (place - (int(ends[row - 1]) if row else 0)) % int(per_row[row])
    return row, int(np.searchsorted(np.cumsum(enough[row] * lines), place, side="right"))


class Tiles:
    """Evaluation windows of one survey: those that cover its held-out lines and are live enough."""

    def __init__(self, shape: Index, window: Index, s: Split, live: Live | None) -> None:
        rows, lines, self._samples = tiles(shape, window)
        self.blocks: list[tuple[list[int], list[int]]] = []
        for first, size in s.held_out:
            within = [first + origin for origin in cover(size, window[s.axis])]
            self.blocks.append((rows, within) if s.axis else (within, lines))
        best = None
        if live is not None and self.blocks:
            best = np.concatenate([part for block in self.blocks for part in live.on(*block)])
        self.grid = Grid([(len(i), len(x)) for i, x in self.blocks], len(self._samples), best, live)

    def origin(self, place: int) -> Index:
        """Where window `place` of `grid.size` begins."""
        block, (i, x, t) = self.grid.locate(place)
        rows, lines = self.blocks[block]
        return rows[i], lines[x], self._samples[t]


def _running_sums(values: np.ndarray, width: int, axis: int) -> np.ndarray:
    """Sums of `width` neighbours along `axis`."""
    ends = np.cumsum(values, axis=axis, dtype=np.int32)
    sums = np.delete(ends, np.s_[: width - 1], axis=axis)
    np.moveaxis(sums, axis, 0)[1:] -= np.moveaxis(ends, axis, 0)[:-width]
    return sums
