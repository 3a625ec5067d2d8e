"""One optimiser step over this rank's micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sfm.model.mae import masked_live
from sfm.parallel.context import Attends
from sfm.parallel.engines import Engine

CPU = torch.device("cpu")


class MicroBatch(NamedTuple):
    """This rank's slab of a few windows."""

    voxels: Tensor
    """[B, I, X, T] of any float type (float32 on the device), NaN without data."""
    visible: Tensor
    """[B, V] int64 tokens, numbered over the whole window."""
    masked: Tensor
    """[B, M] int64."""

    @classmethod
    def of(cls, columns: Mapping[str, np.ndarray]) -> MicroBatch:
        """What a feed gave, without a copy."""
        return cls(amplitudes(columns["voxels"]), *(torch.from_numpy(columns[name]) for name in ("visible", "masked")))

    def to(self, device: torch.device) -> MicroBatch:
        voxels, visible, masked = (tensor.to(device) for tensor in self)
        return MicroBatch(voxels.float(), visible, masked)


class StepResult(NamedTuple):
    """The same on every rank."""

    loss: float
    """Mean squared error over all masked live voxels of the global batch (normalised amplitudes squared)."""
    grad_norm: float
    """Global norm before clipping."""


def amplitudes(voxels: np.ndarray) -> Tensor:
    """Windows of any `window.dtype` as a tensor, without a copy; bfloat16 comes as its bits in uint16."""
    if voxels.dtype == np.uint16:
        return torch.from_numpy(voxels.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(voxels)


def total(value: Tensor) -> Tensor:
    """Sum of a tensor over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def of_every_rank(values: Sequence[float], device: torch.device) -> Tensor:
    """`values` of each rank, float64 [ranks, n]. Collective."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    found = torch.zeros(ranks, len(values), dtype=torch.float64)
    found[rank] = torch.tensor(values, dtype=torch.float64)
    return total(found.to(device)).cpu()


def run_step(
    engine: Engine,
    micro_batches: Sequence[MicroBatch],
    lr: float,
    patch: tuple[int, int, int],
    attends: Attends,
    first_row: int,
    device: torch.device = CPU,
) -> StepResult:
    """Forward and backward over `micro_batches`, then one update with rate `lr`. Collective.

    Args:
        first_row: first patch row of this rank's slab.
        device: where to compute; of several micro-batches it holds one at a time.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    # The global count divides every rank's loss, so it must be known before the first backward pass.
    if len(micro_batches) == 1:
        micro_batches = [micro_batches[0].to(device)]  # once for both passes
    counts = [masked_live(b.voxels.to(device), b.masked.to(device), patch, first_row) for b in micro_batches]
    count = total(torch.stack(counts).sum()).clamp(min=1)
    error = torch.zeros((), dtype=torch.float64, device=count.device)
    for batch in micro_batches:
        loss = engine.model(
            *batch.to(device),
            first_row=first_row,
            attend_encoder=attends.encoder,
            attend_decoder=attends.decoder,
            registers=attends.registers,
        )
        error += loss.detach().double()
        engine.backward(loss * (world / count))
    grad_norm = engine.step(lr)
    return StepResult((total(error) / count).item(), grad_norm)
