"""What a survey looks like: an inline, a crossline and a time slice through it, as one picture."""

from __future__ import annotations

import contextlib
import io
from typing import Literal

import numpy as np

from sfm.survey.clients import SurveyError
from sfm.survey.mdio import Axis, Survey
from sfm.survey.reader import WindowReader
from sfm.survey.transfers import Transfers

Colours = Literal["grey", "seismic"]
_MAPS = {"grey": "gray", "seismic": "seismic"}


def position(axis: Axis, coordinate: float | None) -> int:
    """Index of the position nearest to `coordinate` along `axis`; the middle where none is given.

    Raises:
        SurveyError: it lies outside.
    """
    values = axis.coordinates
    if coordinate is None:
        return len(values) // 2
    low, high = float(values.min()), float(values.max())
    if not low <= coordinate <= high:
        raise SurveyError(
            f"{axis.name} {coordinate:g} lies outside the survey: {low:g} to {high:g} {axis.unit}".rstrip()
        )
    return int(np.abs(values - coordinate).argmin())


def section(survey: Survey, axis: int, index: int, transfers: Transfers | None = None) -> np.ndarray:
    """One slice through the survey, two-dimensional float32, NaN where there is no data.

    A slice may touch very many chunks; no more are on their way, or decoded, than the memory of `transfers` holds.

    Args:
        axis: across which it is cut.
        transfers: threads and memory; default: its own.

    Raises:
        SurveyError: a chunk cannot be read.
    """
    origin, shape = [0, 0, 0], list(survey.shape)
    origin[axis], shape[axis] = index, 1
    reader = WindowReader(survey, transfers=transfers, keep=False)
    try:
        return reader.read((origin[0], origin[1], origin[2]), (shape[0], shape[1], shape[2])).squeeze(axis)
    finally:
        reader.close()


def preview_png(
    survey: Survey, at: tuple[float | None, float | None, float | None], colours: Colours = "grey"
) -> bytes:
    """A PNG of the slices at coordinates `at` (inline, crossline, time or depth), all on one symmetric amplitude scale.

    Raises:
        SurveyError: a coordinate lies outside, or a chunk cannot be read.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    inline, crossline, sample = survey.axes
    indices = [position(axis, c) for axis, c in zip(survey.axes, at, strict=True)]
    # One after the other: each alone keeps the store as busy as it can be.
    with contextlib.closing(Transfers()) as transfers:
        slices = [section(survey, n, indices[n], transfers) for n in range(3)]
    amplitudes = np.concatenate([s[np.isfinite(s)] for s in slices])
    limit = float(np.percentile(np.abs(amplitudes), 99)) if amplitudes.size else 1.0
    limit = limit or 1.0

    figure = Figure(figsize=(15, 5.4), layout="constrained", dpi=110)
    panels = figure.subplots(1, 3, width_ratios=[1, 1, 1.05])
    drawn = (
        (slices[0].T, crossline, sample, inline, indices[0]),
        (slices[1].T, inline, sample, crossline, indices[1]),
        (slices[2].T, inline, crossline, sample, indices[2]),
    )
    images = []
    for panel, (values, across, down, cut, index) in zip(panels, drawn, strict=True):
        left, right = _edges(across)
        top, bottom = _edges(down)
        flat = cut is sample  # a map: the second axis counts upwards
        images.append(panel.imshow(
            values, cmap=_MAPS[colours], vmin=-limit, vmax=limit, aspect="auto",
            interpolation="nearest" if flat else "bilinear",
            extent=(left, right, bottom, top) if not flat else (left, right, top, bottom),
            origin="lower" if flat else "upper",
        ))  # fmt: skip
        panel.set_facecolor("#d9d4c7")  # no data
        panel.set_xlabel(_label(across))
        panel.set_ylabel(_label(down))
        panel.set_title(f"{cut.name} {cut.coordinates[index]:g} {cut.unit}".rstrip(), fontsize=12)
        panel.tick_params(labelsize=9)
    # Where each picture is cut by the two others.
    lines = {"color": "#f2a900", "linewidth": 0.9, "alpha": 0.8, "linestyle": (0, (6, 4))}
    at_i, at_x, at_t = (axis.coordinates[n] for axis, n in zip(survey.axes, indices, strict=True))
    for panel, (vertical, horizontal) in zip(panels, ((at_x, at_t), (at_i, at_t), (at_i, at_x)), strict=True):
        panel.axvline(vertical, **lines)
        panel.axhline(horizontal, **lines)
    bar = figure.colorbar(images[0], ax=panels, shrink=0.9, pad=0.015, extend="both")
    bar.set_label("amplitude, as stored")
    name = survey.url.rstrip("/").rsplit("/", 1)[-1]
    sizes = " x ".join(f"{n:,} {axis.name}s" for n, axis in zip(survey.shape[:2], survey.axes[:2], strict=True))
    figure.suptitle(f"{name}   {sizes} x {survey.shape[2]:,} samples", fontsize=13, x=0.01, ha="left")
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _edges(axis: Axis) -> tuple[float, float]:
    """First and last coordinate, half a step further out: pixels are centred on positions."""
    values = axis.coordinates
    first, last = float(values[0]), float(values[-1])
    half = (last - first) / max(len(values) - 1, 1) / 2 or 0.5
    return first - half, last + half


def _label(axis: Axis) -> str:
    return f"{axis.name} [{axis.unit}]" if axis.unit else axis.name
