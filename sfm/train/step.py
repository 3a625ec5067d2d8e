"""One optimiser step over this rank's micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sfm.model.mae import masked_live
from sfm.parallel.context import Attends
from sfm.parallel.engines import Engine


class MicroBatch(NamedTuple):
    """This rank's slab of a few windows, on its device."""

    voxels: Tensor
    """[B, I, X, T] float32, NaN without data."""
    visible: Tensor
    """[B, V] int64 tokens, numbered over the whole window."""
    masked: Tensor
    """[B, M] int64."""


class StepResult(NamedTuple):
    """The same on every rank."""

    loss: float
    """Mean squared error over all masked live voxels of the global batch (normalised amplitudes squared)."""
    grad_norm: float
    """Global norm before clipping."""


def total(value: Tensor) -> Tensor:
    """Sum of a scalar over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def run_step(
    engine: Engine,
    micro_batches: Sequence[MicroBatch],
    lr: float,
    patch: tuple[int, int, int],
    attends: Attends,
    first_row: int,
) -> StepResult:
    """Forward and backward over `micro_batches`, then one update with rate `lr`. Collective.

    Args:
        first_row: first patch row of this rank's slab.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    # The global count divides every rank's loss, so it must be known before the first backward pass.
    counts = [masked_live(batch.voxels, batch.masked, patch, first_row) for batch in micro_batches]
    count = total(torch.stack(counts).sum()).clamp(min=1)
    error = torch.zeros((), dtype=torch.float64, device=count.device)
    for batch in micro_batches:
        loss = engine.model(
            *batch,
            first_row=first_row,
            attend_encoder=attends.encoder,
            attend_decoder=attends.decoder,
            registers=attends.registers,
        )
        error += loss.detach().double()
        engine.backward(loss * (world / count))
    grad_norm = engine.step(lr)
    return StepResult((total(error) / count).item(), grad_norm)
