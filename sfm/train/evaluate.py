"""How well held-out windows are rebuilt: the model against the mean of visible neighbours, on the same voxels."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sfm.feed.source import SampleSource
from sfm.model.baseline import neighbour_mean
from sfm.model.mae import Scale, masked_live, squared_error, targets
from sfm.model.patches import gather_patches, scatter_patches
from sfm.parallel.context import Attends, attends
from sfm.parallel.mesh import Mesh
from sfm.plan.shares import shares
from sfm.plan.tiles import HEAD_TILE
from sfm.spec import JobSpec
from sfm.survey.sampler import Sample
from sfm.train.step import CPU, MicroBatch, amplitudes, total

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
    sampler = source.sampler
    windows = min(limit, sampler.n_evaluation)
    attend = _attention(mesh, source.spec)
    section = None
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # model, baseline, voxels
    model.eval()
    for first in range(0, windows, mesh.data):
        # Every rank computes equally often, as collectives demand; what lies past the end is computed and not counted.
        number = first + mesh.data_rank
        sample, index = sampler.evaluation(number % windows), FIRST_INDEX + number % windows
        errors, drawn = _errors(model, source, sample, index, attend, device, draw=number == 0)
        if number < windows:
            sums += errors
        section = section or drawn
    model.train()
    model_error, baseline_error, count = total(sums).tolist()
    return HeldOut(model_error / max(count, 1), baseline_error / max(count, 1), windows), section


def _attention(mesh: Mesh, spec: JobSpec) -> list[tuple[slice, Attends]]:
    """Which of a slab's masked tokens go through the decoder together, and the attention for them.

    All are rebuilt, also where training predicts a few; but of these no more at a time than training takes.
    """
    everything, taken = shares(spec, 1.0).predicted, shares(spec).predicted
    count = max(math.ceil(n / m) for n, m in zip(everything, taken, strict=True))
    parts = [slice(first, None, count) for first in range(count)]
    return [(part, attends(mesh, spec, share=1.0, which=part)) for part in parts]


def _errors(
    model: nn.Module,
    source: SampleSource,
    sample: Sample,
    index: int,
    attend: list[tuple[slice, Attends]],
    device: torch.device,
    *,
    draw: bool,
) -> tuple[Tensor, Section | None]:
    """(squared error of the model, that of the baseline, live masked voxels) of a window's slab, [3]; with `draw` also
    the section, if it is in this slab."""
    spec, rows = source.spec, source.rows
    voxels = amplitudes(source.voxels(sample))[None].to(device).float()  # [1, I, X, T]
    visible, masked = _mask(source, index, rows, device)
    line = _Line(source, voxels) if draw and spec.grid[0] // 2 in rows else None
    of_model = [
        _model_error(model, source, MicroBatch(voxels, visible, masked[:, part]), attention, line)
        for part, attention in attend
    ]
    of_baseline = [_baseline_error(source, sample, index, voxels, row) for row in rows]
    count = masked_live(voxels, masked, spec.model.patch, rows.start)
    errors = torch.stack([torch.stack(of_model).sum(), torch.stack(of_baseline).sum(), count.double()])
    return errors, line.section(sample) if line is not None else None


class _Line:
    """The inline through the middle of a window, from the slab that holds it; drawn patch by patch."""

    def __init__(self, source: SampleSource, voxels: Tensor) -> None:
        spec = source.spec
        self.row, self.patch = spec.grid[0] // 2, spec.model.patch
        self.per_row = spec.grid[1] * spec.grid[2]
        self.inside = self.patch[0] // 2  # which of the lines of a patch
        first = (self.row - source.rows.start) * self.patch[0]
        self.original = voxels[:, first + self.inside, None].clone()  # [1, 1, X, T]
        self.masked = self.rebuilt = self.original

    def draw(self, prediction: Tensor, tokens: Tensor, scale: Scale) -> None:
        """Add those of the predicted patches [1, n, P] that it goes through."""
        (here,) = (tokens[0] // self.per_row == self.row).nonzero(as_tuple=True)  # [k]
        cut = prediction.unflatten(2, self.patch)[:, :, self.inside][:, here].flatten(2).float()  # [1, k, px pt]
        cut = Scale(*(part[:, here] for part in scale)).invert(cut)
        places, flat = tokens[:, here] - self.row * self.per_row, (1, *self.patch[1:])
        self.masked = scatter_patches(torch.full_like(cut, torch.nan), places, self.masked, flat)
        self.rebuilt = scatter_patches(cut, places, self.rebuilt, flat)

    def section(self, sample: Sample) -> Section:
        rebuilt = self.rebuilt.masked_fill(self.original.isnan(), torch.nan)
        original, shown, complete = (image[0, 0].cpu().numpy() for image in (self.original, self.masked, rebuilt))
        inline = sample.origin[0] + self.row * self.patch[0] + self.inside
        return Section(original, shown, complete, inline, sample.origin, sample.survey)


def _model_error(
    model: nn.Module, source: SampleSource, batch: MicroBatch, attend: Attends, line: _Line | None
) -> Tensor:
    """Scalar: the model's squared error over the slab of one window, in tiles of the head; draws `line`."""
    spec, first_row = source.spec.model, source.rows.start

    def error(prediction: Tensor, tokens: Tensor) -> Tensor:  # [1, n, P], [1, n]
        target, scale = targets(batch.voxels, tokens, spec.patch, first_row, normalise=spec.normalise_patches)
        if line is not None:
            line.draw(prediction, tokens, scale)
        return squared_error(prediction, target).double()

    return model(
        *batch, first_row=first_row, attend_encoder=attend.encoder, attend_decoder=attend.decoder,
        registers=attend.registers, error=error,
    )  # fmt: skip


def _baseline_error(source: SampleSource, sample: Sample, index: int, voxels: Tensor, row: int) -> Tensor:
    """Scalar: the baseline's squared error over a patch row of the slab `voxels` [1, I, X, T], in tiles."""
    spec, rows, device = source.spec, source.rows, voxels.device
    patch, per_row = spec.model.patch, spec.grid[1] * spec.grid[2]

    def shown(row: int) -> tuple[Tensor, Tensor]:
        """Visible patches of a row, [1, V, P], and their tokens. What is not in the slab is read."""
        if row in rows:
            visible, _ = _mask(source, index, range(row, row + 1), device)
            return gather_patches(voxels, visible, patch, rows.start), visible
        visible, _ = _mask(source, index, range(row, row + 1), CPU)
        beside = amplitudes(source.voxels(sample, range(row, row + 1)))[None].float()
        return gather_patches(beside, visible, patch, row).to(device), visible.to(device)

    near = range(max(row - 1, 0), min(row + 2, spec.grid[0]))
    patches, visible = (torch.cat(parts, dim=1) for parts in zip(*map(shown, near), strict=True))
    before, grid = near.start * per_row, (len(near), *spec.grid[1:])

    def of_tile(tokens: Tensor) -> Tensor:  # [1, n]
        mean = neighbour_mean(patches, visible - before, tokens - before, grid)  # [1, n, P]
        target, scale = targets(voxels, tokens, patch, rows.start, normalise=spec.model.normalise_patches)
        mean = scale.apply(mean).nan_to_num_(0.0)  # a patch without data has no scale, and its target is NaN, too
        return squared_error(mean, target).double()

    _, masked = _mask(source, index, range(row, row + 1), device)
    return torch.stack([of_tile(tile) for tile in masked.split(HEAD_TILE, dim=1)]).sum()


def _mask(source: SampleSource, index: int, rows: range, device: torch.device) -> tuple[Tensor, Tensor]:
    """Visible and masked tokens of patch `rows` of a sample, each [1, n]."""
    visible, masked = (torch.from_numpy(tokens)[None].to(device) for tokens in source.mask(index, rows))
    return visible, masked
