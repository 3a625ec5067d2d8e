"""The rebuild that needs no learning: each masked patch is the mean of its visible neighbours."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from sfm.model.patches import Grid


def neighbour_mean(patches: Tensor, visible: Tensor, masked: Tensor, grid: Grid) -> Tensor:
    """Predict masked patches as the voxel-wise mean over the visible ones among their 26 neighbours.

    Args:
        patches: [B, V, P] visible patches, NaN where there is no data (left out of the mean).
        visible, masked: [B, V] and [B, M] int64 token numbers.

    Returns:
        [B, M, P]; zero, the survey's mean, where no visible neighbour has data.
    """
    batch, _, volume = patches.shape
    live = ~patches.isnan()
    total = patches.new_zeros(batch, grid[0] * grid[1] * grid[2], volume)
    count = torch.zeros_like(total)
    where = visible[..., None].expand_as(patches)
    total.scatter_(1, where, patches.nan_to_num(0.0))
    count.scatter_(1, where, live.to(count.dtype))
    total, count = _sum_of_neighbours(total, grid), _sum_of_neighbours(count, grid)
    mean = total / count.clamp(min=1)
    return mean.gather(1, masked[..., None].expand(-1, -1, volume))


def _sum_of_neighbours(values: Tensor, grid: Grid) -> Tensor:
    """[B, N, P] -> [B, N, P]: sum over the 3 x 3 x 3 box around each token, the token itself left out."""
    cube = torch.nn.functional.pad(values.unflatten(1, grid), (0, 0, 1, 1, 1, 1, 1, 1))
    total = torch.zeros_like(values).unflatten(1, grid)
    for di, dx, dt in itertools.product(range(3), repeat=3):
        if (di, dx, dt) != (1, 1, 1):
            total += cube[:, di : di + grid[0], dx : dx + grid[1], dt : dt + grid[2]]
    return total.flatten(1, 3)
