"""The rebuild that needs no learning: each masked patch is the mean of its visible neighbours."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sfm.model.patches import Grid, coordinates


def neighbour_mean(patches: Tensor, visible: Tensor, masked: Tensor, grid: Grid) -> Tensor:
    """Predict masked patches as the voxel-wise mean over the visible ones among their 26 neighbours.

    Nothing is held but for the `masked` tokens given, which may be a few of all.

    Args:
        patches: [B, V, P] visible patches, NaN where there is no data (left out of the mean).
        visible, masked: [B, V] and [B, M] int64 token numbers.

    Returns:
        [B, M, P]; zero, the survey's mean, where no visible neighbour has data.
    """
    flat = patches.flatten(0, 1)  # [B V, P]
    place = visible.new_full((len(visible), math.prod(grid)), -1)  # [B, N]: where in `flat` a token is, if it is
    place.scatter_(1, visible, torch.arange(len(flat), device=flat.device).view_as(visible))
    cube = F.pad(place.unflatten(1, grid), (1,) * 6, value=-1)  # [B, gi + 2, gx + 2, gt + 2]
    window = torch.arange(len(masked), device=masked.device)[:, None]
    i, x, t = coordinates(masked, grid)  # each [B, M]
    total = flat.new_zeros(masked.numel(), flat.shape[1])  # [B M, P]
    count = torch.zeros_like(total, dtype=torch.uint8)
    for di, dx, dt in itertools.product(range(3), repeat=3):  # the token itself is masked, so never found
        near = cube[window, i + di, x + dx, t + dt].flatten()  # [B M]
        into = (near >= 0).nonzero()[:, 0]  # [K]
        found = flat[near[into]]  # [K, P]
        count.index_add_(0, into, found.eq(found).to(count.dtype))
        total.index_add_(0, into, found.nan_to_num_(0.0))
    return total.div_(count.clamp_(min=1)).view(*masked.shape, total.shape[1])
