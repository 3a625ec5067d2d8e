"""How well held-out windows are rebuilt: the model against the mean of visible neighbours, on the same voxels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from sfm.feed.source import SampleSource
from sfm.model.baseline import neighbour_mean
from sfm.model.mae import masked_live, squared_error, targets
from sfm.model.patches import gather_patches, scatter_patches
from sfm.parallel.context import attends
from sfm.parallel.mesh import Mesh
from sfm.train.step import total

FIRST_INDEX = 1 << 63  # numbers of held-out samples lie beyond those of training, so their masks are their own


class Section(NamedTuple):
    """One inline of a held-out window, each [X, T] float32, NaN where there is nothing."""

    original: np.ndarray
    masked: np.ndarray
    """What the model was shown."""
    rebuilt: np.ndarray
    """What it was shown, completed by what it predicted."""
    inline: int
    """Index of the inline in the survey."""
    origin: tuple[int, int, int]
    """First voxel of the window in the survey."""
    survey: int
    """Which survey of the spec."""


class HeldOut(NamedTuple):
    """Mean squared error over masked live voxels of held-out windows, in the units of the training loss."""

    model: float
    baseline: float
    windows: int


@torch.no_grad()
def evaluate(
    model: nn.Module, source: SampleSource, mesh: Mesh, device: torch.device, limit: int = 16
) -> tuple[HeldOut, Section | None]:
    """Rebuild up to `limit` held-out windows, shared among the data-parallel ranks. Collective.

    Returns:
        (errors, section): errors the same on every rank; the section on the one rank that owns it.
    """
    spec, sampler, rows = source.spec, source.sampler, source.rows
    attend = attends(mesh, spec, share=1.0)  # every masked token is rebuilt here, also where training takes a few
    windows = min(limit, sampler.n_evaluation)
    section = None
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # model, baseline, voxels
    model.eval()
    for first in range(0, windows, mesh.data):
        # Every rank computes equally often, as collectives demand; what lies past the end is computed and not counted.
        number = first + mesh.data_rank
        sample = sampler.evaluation(number % windows)
        index = FIRST_INDEX + number % windows
        with_halo = range(max(rows.start - 1, 0), min(rows.stop + 1, spec.grid[0]))  # neighbours of our patches
        around = torch.from_numpy(source.voxels(sample, with_halo))[None].to(device)
        skip = (rows.start - with_halo.start) * spec.model.patch[0]
        voxels = around[:, skip : skip + len(rows) * spec.model.patch[0]]
        visible, masked = (torch.from_numpy(t)[None].to(device) for t in source.mask(index))
        shown, _ = (torch.from_numpy(t)[None].to(device) for t in source.mask(index, with_halo))

        prediction = model(
            voxels, visible, masked, first_row=rows.start,
            attend_encoder=attend.encoder, attend_decoder=attend.decoder, registers=attend.registers, predict=True,
        ).float()  # fmt: skip
        target, scale = targets(voxels, masked, spec.model.patch, rows.start, normalise=spec.model.normalise_patches)
        per_row = spec.grid[1] * spec.grid[2]
        before = with_halo.start * per_row
        neighbours = neighbour_mean(
            gather_patches(around, shown, spec.model.patch, with_halo.start),
            shown - before,
            masked - before,
            (len(with_halo), spec.grid[1], spec.grid[2]),
        )
        if number < windows:
            sums[0] += squared_error(prediction, target)
            sums[1] += squared_error(scale.apply(neighbours), target)
            sums[2] += masked_live(voxels, masked, spec.model.patch, rows.start)
        if number == 0 and spec.grid[0] // 2 in rows:
            section = _section(source, voxels, masked, scale.invert(prediction), sample.origin, sample.survey)
    model.train()
    model_error, baseline_error, count = total(sums).tolist()
    return HeldOut(model_error / max(count, 1), baseline_error / max(count, 1), windows), section


def _section(
    source: SampleSource,
    voxels: torch.Tensor,
    masked: torch.Tensor,
    prediction: torch.Tensor,
    origin: tuple[int, int, int],
    survey: int,
) -> Section:
    """The inline through the middle of the window, from the slab that holds it."""
    spec, rows = source.spec, source.rows
    thickness = spec.model.patch[0]
    middle = spec.grid[0] // 2 * thickness + thickness // 2  # counted in the window
    line = middle - rows.start * thickness
    tokens = masked - rows.start * spec.grid[1] * spec.grid[2]
    hidden = scatter_patches(torch.full_like(prediction, torch.nan), tokens, voxels, spec.model.patch)
    rebuilt = scatter_patches(prediction, tokens, voxels, spec.model.patch)
    original, shown, complete = (v[0, line].cpu().numpy() for v in (voxels, hidden, rebuilt))
    return Section(original, shown, np.where(np.isnan(original), np.nan, complete), origin[0] + middle, origin, survey)
