"""Which window is sample number n: a pure function of (seed, epoch, index), without I/O, the same at any world size.

The training lines of a survey are cut into cells about as large as a window (`sfm.survey.cells`). In each round every
cell is visited once, in an order of that round's own, and gives one window at random. An epoch has as many windows as
there are cells; it mixes surveys by their weights, and each survey takes up its rounds where the epoch before left off.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from sfm.spec import Window
from sfm.survey.cells import Cells, Live, Strata, Tiles
from sfm.survey.clients import SurveyError
from sfm.survey.shuffle import permuted, random_bits
from sfm.survey.split import AXES, Index, Lines, Split, split

_RULE = 1  # of the order; a new number where code changes which window a number is
_EPOCH, _ROUND, _ORIGIN = 2, 3, 4  # streams of the generator


@dataclass(frozen=True, eq=False)
class Area:
    """What is sampled of one survey."""

    shape: Index
    """Voxels (inline, crossline, sample)."""
    weight: float = 1.0
    """Relative share of the training windows."""
    name: str = "survey"
    """For sentences."""
    trace_mask: np.ndarray | None = None
    """Which traces exist, bool [inline, crossline]; all where it is None."""
    held_out: bool = False
    """Whether all of it is for evaluation."""
    chunks: Index | None = None
    """Voxels of its chunks, for windows that are to meet few of them."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One window of one survey."""

    survey: int
    """Which survey, in the order of the spec."""
    origin: Index
    """First voxel (inline, crossline, sample), an index from 0."""
    index: int
    """The sample's number, which goes on from epoch to epoch."""
    epoch: int
    """Which epoch, from 0; 0 in evaluation."""


class Visit(NamedTuple):
    """Which cell a training sample is drawn in."""

    survey: int
    drawn: int
    """How many windows of that survey came before."""
    round: int
    """How many times each of its cells was visited before this round."""
    block: int
    """Which of the survey's stretches of training lines."""
    strata: Index
    """Stratum along each axis."""
    cell: int
    """Number of the cell in the survey."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a job has come, and in which plan: what a checkpoint keeps of the sampler."""

    epoch: int
    """Epoch of the next sample."""
    index: int
    """Its place in the epoch."""
    plan: str
    """Fingerprint of all that decides the order."""

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values, less than 1 KiB."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Cursor:
        """The opposite of :meth:`to_json`.

        Raises:
            SurveyError: this is no cursor.
        """
        kinds = {"epoch": int, "index": int, "plan": str}
        if (
            not isinstance(data, dict)
            or {k: type(v) for k, v in data.items()} != kinds
            or min(data["epoch"], data["index"]) < 0
        ):
            raise SurveyError(
                f"this is no cursor of the sampler: {str(data)[:80]}; the checkpoint is damaged, take an earlier one"
            )
        return cls(**data)


class Sampler:
    """Draws training windows, every cell in turn, and covers what is held out with evaluation windows.

    Args:
        areas: of each survey, in the order of the spec.
        window: shape and rules of a window.
        seed: of the training windows.

    Raises:
        SurveyError: a survey is too small for the window, or for a training and an evaluation window side by side;
            no window has as many live traces as it must; or no survey is for training.
    """

    def __init__(self, areas: Sequence[Area], window: Window, seed: int) -> None:
        self.areas, self.window, self.seed = list(areas), window, seed
        self.splits = [split(area.shape, window, area.name, held_out=area.held_out) for area in self.areas]
        live = [self._live(area) for area in self.areas]
        self._cells = [
            self._training(area, s, alive) if s.training else None
            for area, s, alive in zip(self.areas, self.splits, live, strict=True)
        ]
        if not any(self._cells):
            raise SurveyError("every survey is held out for evaluation; leave one for training")
        sizes = [cells.grid.size if cells else 0 for cells in self._cells]
        self.windows_per_epoch: int = sum(sizes)
        """Training windows of an epoch: the cells of all surveys."""
        self.counts = apportion(self.windows_per_epoch, [a.weight * (n > 0) for a, n in zip(areas, sizes, strict=True)])
        """How many of them each survey gives."""
        self._ends = list(itertools.accumulate(self.counts))
        self._evaluation = [
            Tiles(area.shape, self.window.shape, s, alive)
            for area, s, alive in zip(self.areas, self.splits, live, strict=True)
        ]
        self._evaluation_ends = list(itertools.accumulate(each.grid.size for each in self._evaluation))
        self.n_evaluation: int = self._evaluation_ends[-1]
        """Number of distinct evaluation windows."""
        self._stride = _golden_stride(self.n_evaluation)
        if any(s.held_out for s in self.splits) and not self.n_evaluation:
            most = max(each.grid.most for each in self._evaluation if each.blocks)
            raise self._too_empty("the surveys", "held out for evaluation", most)
        self.plan = self._fingerprint([alive is not None for alive in live])
        """Fingerprint of all that decides the order."""

    def train(self, number: int) -> Sample:
        """Training sample `number` (0 or more, without end), in constant time."""
        return self.at(*divmod(number, self.windows_per_epoch))

    def at(self, epoch: int, index: int) -> Sample:
        """Training sample `index` of `epoch`; `train` counts on through the epochs."""
        visit = self.visit(epoch, index)
        cells = self._cells[visit.survey]
        assert cells is not None
        across, down = random_bits(self.seed, _ORIGIN, (visit.drawn, visit.survey), 2).tolist()
        origin = cells.draw(visit.cell, across, down)
        return Sample(visit.survey, origin, epoch * self.windows_per_epoch + index, epoch)

    def visit(self, epoch: int, index: int) -> Visit:
        """The cell in which sample `index` of `epoch` is drawn.

        Raises:
            SurveyError: an epoch has fewer windows, or one of the two is negative.
        """
        if epoch < 0 or not 0 <= index < self.windows_per_epoch:
            raise SurveyError(
                f"an epoch has {self.windows_per_epoch} training windows; number {index} of epoch {epoch} is not "
                "among them"
            )
        slot = permuted(index, self.windows_per_epoch, self.seed, _EPOCH, (epoch, 0))
        survey = bisect.bisect_right(self._ends, slot)
        cells = self._cells[survey]
        assert cells is not None
        drawn = (epoch + 1) * self.counts[survey] + slot - self._ends[survey]
        turn, place = divmod(drawn, cells.grid.size)
        cell = permuted(place, cells.grid.size, self.seed, _ROUND, (turn, survey))
        return Visit(survey, drawn, turn, *cells.grid.locate(cell), cell)

    def cursor(self, number: int) -> Cursor:
        """Where training sample `number` stands, to go on from there."""
        return Cursor(*divmod(number, self.windows_per_epoch), self.plan)

    def resume(self, cursor: Cursor) -> int:
        """The number of the training sample at `cursor`.

        Raises:
            SurveyError: the cursor is of another plan.
        """
        if cursor.plan != self.plan or cursor.index >= self.windows_per_epoch:
            raise SurveyError(
                f"the order of windows is not the one that epoch {cursor.epoch}, window {cursor.index} was reached in "
                f"(plan {self.plan}, not {cursor.plan}): the seed, the window, the weights, or a survey's shape, trace "
                "mask, chunks or held-out lines have changed; restore them, or begin a new job"
            )
        return cursor.epoch * self.windows_per_epoch + cursor.index

    def evaluation(self, index: int) -> Sample:
        """Evaluation sample number `index` of `n_evaluation`; the first few already spread over all held-out blocks.

        Raises:
            SurveyError: nothing is held out, or there are fewer windows.
        """
        if not self.n_evaluation:
            raise SurveyError("window.held_out is 0: no lines are kept for evaluation")
        if not 0 <= index < self.n_evaluation:
            raise SurveyError(f"there are {self.n_evaluation} evaluation windows; number {index} is not among them")
        place = index * self._stride % self.n_evaluation
        survey = bisect.bisect_right(self._evaluation_ends, place)
        place -= self._evaluation_ends[survey] - self._evaluation[survey].grid.size
        return Sample(survey, self._evaluation[survey].origin(place), index, 0)

    def describe(self) -> str:
        """The split in words, one sentence per survey, and one on the epoch."""
        epoch = self.windows_per_epoch
        parts = [self._describe(n) for n in range(len(self.areas))]
        return " ".join([*parts, f"An epoch is {epoch:,} training window{'s' * (epoch != 1)}."])

    def _describe(self, survey: int) -> str:
        area, (axis, training, held_out), cells = self.areas[survey], self.splits[survey], self._cells[survey]
        tested = self._evaluation[survey].grid.size
        windows = f"{tested:,} evaluation window{'s' * (tested != 1)}"
        size, lines, kept = area.shape[axis], f"{AXES[axis]}s", sum(block.size for block in held_out)
        if cells is None:
            return f"{area.name}: all of it is held out ({windows})."
        if not held_out:
            both = f"all {area.shape[0]} inlines x {area.shape[1]} crosslines are for training"
            words = f"{area.name}: {both}, nothing is held out"
        elif len(held_out) == 1:
            guard = size - kept - training[0].size
            between = f"the next {guard} are left out, " if guard else ""
            words = (
                f"{area.name}: {lines} 1-{training[0].size} of {size} are for training, {between}the last {kept} are "
                f"held out ({windows})"
            )
        else:
            used = sum(block.size for block in training)
            words = (
                f"{area.name}: of {size} {lines} in {len(held_out)} stretches, {used} are for training, {kept} are held "
                f"out ({windows}), {size - used - kept} are between them"
            )
        if cells.grid.left_out:
            cellular = f"{cells.grid.left_out:,} of {cells.grid.left_out + cells.grid.size:,} cells"
            words += f"; {cellular} are left out, where fewer than {self.window.min_live:.0%} of traces exist"
        chunks = self._chunks(area)
        if chunks is not None:
            sizes = " x ".join(map(str, chunks))
            words += f"; training windows start where they meet fewest chunks of {sizes}, and at the ends of lines"
        return words + "."

    def _live(self, area: Area) -> Live | None:
        """Which windows of a survey may be used; None where all may."""
        if not self.window.min_live or area.trace_mask is None or area.trace_mask.all():
            return None
        i, x, _ = _inside(area.shape, self.window.shape)
        return Live(area.trace_mask, (i, x), self.window.min_live)

    def _chunks(self, area: Area) -> Index | None:
        return area.chunks if self.window.align else None

    def _training(self, area: Area, s: Split, live: Live | None) -> Cells:
        window = _inside(area.shape, self.window.shape)
        chunks = self._chunks(area) or (1, 1, 1)
        blocks = []
        for lines in s.training:
            whole = [Lines(0, size) for size in area.shape]
            whole[s.axis] = lines
            i, x, t = (Strata.of(*part, need, chunk) for part, need, chunk in zip(whole, window, chunks, strict=True))
            blocks.append((i, x, t))
        cells = Cells(blocks, live)
        if not cells.grid.size:
            raise self._too_empty(area.name, "for training", cells.grid.most)
        return cells

    def _too_empty(self, name: str, purpose: str, most: float) -> SurveyError:
        i, x, _ = self.window.shape
        lower = math.floor(most * 1000) / 1000
        return SurveyError(
            f"{name}: window.min_live {self.window.min_live} asks for live traces in that share of a window's {i} x "
            f"{x}, and no window {purpose} has more than {most:.1%}; take window.min_live at most {lower}, or leave "
            f"out what has no data"
        )

    def _fingerprint(self, masked: Sequence[bool]) -> str:
        surveys = [
            (list(map(int, area.shape)), area.weight, s) for area, s in zip(self.areas, self.splits, strict=True)
        ]
        rule = [_RULE, self.seed, self.window.shape, surveys, masked, any(masked) and self.window.min_live]
        if self.window.align:
            rule.append([self._chunks(area) for area in self.areas])
        digest = hashlib.sha256(json.dumps(rule).encode())
        for area, matters in zip(self.areas, masked, strict=True):
            if matters and area.trace_mask is not None:
                digest.update(np.packbits(area.trace_mask).data)
        return digest.hexdigest()[:16]


def apportion(count: int, weights: Sequence[float]) -> list[int]:
    """`count` things shared out by largest remainder, at least one for every weight above 0 (of which there are no
    more than things); ties go to the first."""
    exact = [Fraction(weight) for weight in weights]
    quotas = [count * weight / sum(exact) for weight in exact]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda n: shares[n] - quotas[n])
    for n in by_remainder[: count - sum(shares)]:
        shares[n] += 1
    for n, weight in enumerate(exact):
        if weight and not shares[n]:
            shares[shares.index(max(shares))] -= 1
            shares[n] = 1
    return shares


def _inside(shape: Index, window: Index) -> Index:
    """The part of a window that lies in a survey, which is less than all of it where it is padded."""
    i, x, t = (min(int(size), need) for size, need in zip(shape, window, strict=True))
    return i, x, t


def _golden_stride(count: int) -> int:
    """A step that visits all of `count` places once, far apart: next to count / golden ratio, without common factor."""
    stride = max(1, round(count * 0.6180339887498949))
    while count and math.gcd(stride, count) != 1:
        stride += 1
    return stride
