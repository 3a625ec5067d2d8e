"""What a user looks at after a run: a rebuilt section and the loss curve, as PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib.figure import Figure

from sfm.survey.mdio import Survey
from sfm.train.evaluate import Section


def section_png(section: Section, survey: Survey, title: str) -> bytes:
    """Original | masked | reconstructed | residual of an inline, all on one amplitude scale."""
    inline, crossline, sample = survey.axes
    crosslines, samples = section.original.shape
    x = crossline.coordinates[section.origin[1] : section.origin[1] + crosslines]
    t = sample.coordinates[section.origin[2] : section.origin[2] + samples]
    residual = section.original - section.rebuilt
    limit = float(np.nanpercentile(np.abs(section.original), 99)) or 1.0
    figure = Figure(figsize=(12, 6.2), layout="constrained")
    axes = figure.subplots(1, 4, sharex=True, sharey=True)
    panels = {
        "original": section.original,
        "masked (what the model sees)": section.masked,
        "reconstructed": section.rebuilt,
        "residual": residual,
    }
    image: Any = None
    for axis, (name, values) in zip(axes, panels.items(), strict=True):
        image = axis.imshow(
            values.T, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest",
            extent=(x[0] - 0.5, x[-1] + 0.5, t[-1], t[0]),
        )  # fmt: skip
        axis.set_facecolor("0.82")
        axis.set_title(name, fontsize=11)
        axis.set_xlabel(crossline.name)
    axes[0].set_ylabel(f"{sample.name} [{sample.unit}]" if sample.unit else sample.name)
    figure.colorbar(image, ax=axes, shrink=0.8, label="amplitude [standard deviations of the survey]")
    figure.suptitle(
        f"{title}, {inline.name} {inline.coordinates[section.inline]}: a window kept out of training", fontsize=12
    )
    return _png(figure)


def loss_png(records: Sequence[dict[str, Any]], held_out: tuple[float, float] | None) -> bytes:
    """Training loss by step, with the held-out errors of model and baseline where there are any."""
    steps = np.array([r["step"] for r in records])
    loss = np.array([r["loss"] for r in records])
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    axis.plot(steps, loss, color="tab:blue", alpha=0.3, linewidth=0.8, label="loss of each step")
    width = max(1, len(loss) // 40)
    smooth = np.convolve(loss, np.ones(width) / width, mode="valid")
    axis.plot(steps[width - 1 :], smooth, color="tab:blue", label=f"mean of {width} steps")
    if held_out is not None:
        axis.axhline(held_out[1], color="tab:red", linestyle="--", label=f"held out, baseline: {held_out[1]:.3f}")
        axis.axhline(held_out[0], color="tab:green", linestyle="--", label=f"held out, model: {held_out[0]:.3f}")
    axis.set(xlabel="step", ylabel="mean squared error on masked patches", ylim=(0, None), title="Training loss")
    axis.grid(alpha=0.3)
    axis.legend()
    return _png(figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
