"""Which lines of a survey are for training and which for evaluation, and how windows cover a stretch of lines."""

from __future__ import annotations

import math
from typing import NamedTuple

from sfm.spec import Window
from sfm.survey.clients import SurveyError

Index = tuple[int, int, int]

AXES = ("inline", "crossline", "sample")


class Lines(NamedTuple):
    """Neighbouring lines of a survey."""

    first: int
    """Index of the first one, from 0."""
    size: int


class Split(NamedTuple):
    """How the lines of one survey are shared between training and evaluation."""

    axis: int
    """Along which horizontal axis it is cut: 0 inline, 1 crossline."""
    training: tuple[Lines, ...]
    """Windows for training lie within one of these."""
    held_out: tuple[Lines, ...]
    """Windows for evaluation lie within one of these; what is in neither is guard."""


def split(shape: Index, window: Window, name: str, *, held_out: bool = False) -> Split:
    """Cut a survey along the horizontal axis that holds most whole windows.

    With B `window.blocks` that axis is cut in B equal stretches, each of training lines, a guard, held-out lines,
    and a guard before the next stretch.

    Args:
        name: of the survey, for sentences.
        held_out: the whole survey is for evaluation.

    Raises:
        SurveyError: it does not hold a window, or not one on each side of every cut.
    """
    for label, size, need in zip(AXES, shape, window.shape, strict=True):
        if need > size and not window.pad:
            raise SurveyError(
                f"{name}: window.shape {need} along {label} exceeds the survey's {size} {label}s; "
                f"take at most {size} there, or set window.pad to fill up with no data"
            )
    axis = 1 if shape[1] // window.shape[1] > shape[0] // window.shape[0] else 0
    size, need = shape[axis], window.shape[axis]
    if held_out:
        return Split(axis, (), (Lines(0, size),))
    if not window.held_out:
        return Split(axis, (Lines(0, size),), ())
    cut = _cut(size, need, window.held_out, window.blocks, window.guard)
    if cut is None:
        raise _no_room(name, AXES[axis], size, need, window)
    return Split(axis, *cut)


def tiles(shape: Index, window: Index, overlap: int = 0) -> tuple[list[int], list[int], list[int]]:
    """Origins along each axis of the fewest windows that cover every voxel of `shape`, evenly spread.

    Args:
        overlap: least number of voxels that neighbours share along each axis; more where windows do not divide.

    Returns:
        (inline, crossline, sample) origins; windows stand at their product. Along an axis shorter than the window
        the only origin is 0.

    Raises:
        SurveyError: the overlap is as large as the window.
    """
    if not 0 <= overlap < min(window):
        raise SurveyError(
            f"windows of {' x '.join(map(str, window))} voxels cannot overlap by {overlap}; take 0 to {min(window) - 1}"
        )
    i, x, t = (cover(size, need, overlap) for size, need in zip(shape, window, strict=True))
    return i, x, t


def cover(size: int, need: int, overlap: int = 0) -> list[int]:
    """The same along one axis."""
    if size <= need:
        return [0]
    steps = math.ceil((size - need) / (need - overlap))
    return [(size - need) * n // steps for n in range(steps + 1)]


def _kept(size: int, need: int, share: float, blocks: int) -> int:
    """Held-out lines of each block."""
    return max(need, math.ceil(math.ceil(round(share * size, 6)) / blocks))


def _cut(
    size: int, need: int, share: float, blocks: int, guard: int
) -> tuple[tuple[Lines, ...], tuple[Lines, ...]] | None:
    """(training, held out) lines, one of each per block; None if a block has no room for a window in both."""
    kept = _kept(size, need, share, blocks)
    training, held_out = [], []
    for block in range(blocks):
        first, end = size * block // blocks, size * (block + 1) // blocks
        count = end - first - kept - guard * (2 if block < blocks - 1 else 1)
        if count < need:
            return None
        training.append(Lines(first, count))
        held_out.append(Lines(first + count + guard, kept))
    return tuple(training), tuple(held_out)


def _no_room(name: str, axis: str, size: int, need: int, window: Window) -> SurveyError:
    """What does not fit, and every single change that makes it fit."""
    share, blocks, guard = window.held_out, window.blocks, window.guard
    kept = _kept(size, need, share, blocks)
    if need > size:
        what = f"{name}: {size} {axis}s, fewer than window.shape {need}, leave none to hold out beside padded windows"
    else:
        stretches = f", cut in {blocks} (window.blocks)," if blocks > 1 else ""
        between = f" with {guard} between them (window.guard)" if guard else ""
        what = (
            f"{name}: {size} {axis}s{stretches} do not hold a window.shape of {need} for training beside {kept} "
            f"{axis}s held out for evaluation{between}"
        )
    # The most that fits, of each field alone; whatever is offered has been tried.
    smaller = next((n for n in range(min(need - 1, size), 0, -1) if _cut(size, n, share, blocks, guard)), 0)
    fewer = next((n for n in range(min(blocks - 1, size), 0, -1) if _cut(size, need, share, n, guard)), 0)
    closer = next((n for n in range(min(guard - 1, size), -1, -1) if _cut(size, need, share, blocks, n)), None)
    offers = [
        f"take at most {smaller} there" if smaller else "",
        f"take window.blocks at most {fewer}" if fewer else "",
        f"take window.guard at most {closer}" if closer is not None else "",
        "set window.held_out to 0",
    ]
    return SurveyError(f"{what}; {', or '.join(offer for offer in offers if offer)}")
