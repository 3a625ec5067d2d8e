"""Which window is sample number n: a pure function of (seed, n), without I/O, the same at any world size."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sfm.survey.store import SurveyError

Index = tuple[int, int, int]

_TRAIN, _EVALUATION = 0, 1  # streams of the generator
_AXES = ("inline", "crossline", "sample")


@dataclass(frozen=True, slots=True)
class Sample:
    """One window of one survey."""

    survey: int
    """Which survey, in the order of the spec."""
    origin: Index
    """First voxel (inline, crossline, sample), an index from 0."""
    index: int
    """The sample's number."""
    key: tuple[int, int, int]
    """(seed, stream, index): keys any further draw that belongs to this sample."""


class Split(NamedTuple):
    """How the lines of one survey are shared between training and evaluation."""

    axis: int
    """Along which horizontal axis it is cut: 0 inline, 1 crossline."""
    training: int
    """Lines 0 .. training - 1 are for training."""
    held_out: int
    """That many lines follow, kept out of training."""


class Sampler:
    """Draws training windows at random and lays evaluation windows out on a grid, in voxels never trained on.

    Args:
        shapes: voxels of each survey.
        weights: relative share of training windows of each survey.
        window: voxels of a window.
        held_out: least share of the lines kept for evaluation; 0 keeps none.
        seed: of the training windows.
        names: of the surveys, for sentences.

    Raises:
        SurveyError: a survey is too small for the window, or for a training and an evaluation window side by side.
    """

    def __init__(
        self,
        shapes: Sequence[Index],
        weights: Sequence[float],
        window: Index,
        held_out: float,
        seed: int,
        names: Sequence[str] | None = None,
    ) -> None:
        self.shapes = [_index(shape) for shape in shapes]
        self.window = _index(window)
        self.seed = seed
        self._names = list(names) if names is not None else [f"survey {n}" for n in range(len(shapes))]
        self.splits = [
            split(shape, self.window, held_out, name) for shape, name in zip(self.shapes, self._names, strict=True)
        ]
        shares = list(itertools.accumulate(weights))
        self._shares = [share / shares[-1] for share in shares]
        self._grids = [
            _evaluation_grid(shape, self.window, s) for shape, s in zip(self.shapes, self.splits, strict=True)
        ]
        self._ends = list(itertools.accumulate(math.prod(len(axis) for axis in grid) for grid in self._grids))
        self.n_evaluation: int = self._ends[-1]
        """Number of distinct evaluation windows."""
        self._stride = _golden_stride(self.n_evaluation)

    def train(self, index: int) -> Sample:
        """Training sample number `index` (0 or more, without end), in constant time."""
        # Raw bits of the counter-based generator, mapped by hand: numpy may change how its own distributions use them.
        bits = np.random.Philox(key=[self.seed, _TRAIN], counter=[0, index, 0, 0]).random_raw(4)
        which, *places = (int(b) for b in bits)
        survey = min(bisect.bisect_right(self._shares, which / 2**64), len(self._shares) - 1)
        room = list(self.shapes[survey])
        room[self.splits[survey].axis] = self.splits[survey].training
        i, x, t = ((r - w + 1) * p >> 64 for r, w, p in zip(room, self.window, places, strict=True))
        return Sample(survey, (i, x, t), index, (self.seed, _TRAIN, index))

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
        survey = bisect.bisect_right(self._ends, place)
        place -= self._ends[survey - 1] if survey else 0
        inlines, crosslines, samples = self._grids[survey]
        place, t = divmod(place, len(samples))
        i, x = divmod(place, len(crosslines))
        origin = inlines[i], crosslines[x], samples[t]
        return Sample(survey, origin, index, (self.seed, _EVALUATION, index))

    def describe(self) -> str:
        """The split in words, one sentence per survey."""
        return " ".join(
            self._describe(name, shape, s) for name, shape, s in zip(self._names, self.shapes, self.splits, strict=True)
        )

    def _describe(self, name: str, shape: Index, s: Split) -> str:
        if not s.held_out:
            return f"{name}: all {shape[0]} inlines x {shape[1]} crosslines are for training, nothing is held out."
        axis = _AXES[s.axis]
        windows = math.prod(len(a) for a in self._grids[self._names.index(name)])
        return (
            f"{name}: {axis}s 1-{s.training} of {shape[s.axis]} are for training, the last {s.held_out} are held out "
            f"({windows} evaluation window{'s' * (windows != 1)})."
        )


def split(shape: Index, window: Index, held_out: float, name: str) -> Split:
    """Cut a survey along the horizontal axis that holds most whole windows.

    Raises:
        SurveyError: it does not hold a window, or not one on each side of the cut.
    """
    for label, size, need in zip(_AXES, shape, window, strict=True):
        if need > size:
            raise SurveyError(
                f"{name}: window.shape {need} along {label} exceeds the survey's {size} {label}s; "
                f"take at most {size} there"
            )
    axis = 1 if shape[1] // window[1] > shape[0] // window[0] else 0
    if not held_out:
        return Split(axis, shape[axis], 0)
    least = math.ceil(round(held_out * shape[axis], 6))
    kept = max(window[axis], least)
    training = shape[axis] - kept
    if training < window[axis]:
        largest = min(shape[axis] // 2, shape[axis] - least)
        smaller = f"take at most {largest} there, or " if largest else ""
        raise SurveyError(
            f"{name}: {shape[axis]} {_AXES[axis]}s do not hold a window.shape of {window[axis]} for training beside "
            f"{kept} {_AXES[axis]}s held out for evaluation; {smaller}set window.held_out to 0"
        )
    return Split(axis, training, kept)


def _index(values: Sequence[int]) -> Index:
    i, x, t = (int(v) for v in values)
    return i, x, t


def _evaluation_grid(shape: Index, window: Index, s: Split) -> list[list[int]]:
    """Origins along each axis of windows that do not overlap, spread over the held-out block."""
    grid = []
    for axis, (size, need) in enumerate(zip(shape, window, strict=True)):
        first, length = (s.training, s.held_out) if axis == s.axis else (0, size)
        count, slack = length // need, length - need
        if count == 1:
            grid.append([first + slack // 2])
        else:
            grid.append([first + slack * n // (count - 1) for n in range(count)])
    return grid


def _golden_stride(count: int) -> int:
    """A step that visits all of `count` places once, far apart: next to count / golden ratio, without common factor."""
    stride = max(1, round(count * 0.6180339887498949))
    while count and math.gcd(stride, count) != 1:
        stride += 1
    return stride
