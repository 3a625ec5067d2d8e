"""Attention across the devices that share one window: gather keys and values, keep queries local.

Every rank gathers the keys and values of all ranks and attends with its own queries; the backward pass
returns each rank the gradient of its own keys and values, summed over all ranks (reduce-scatter). Shards
may be uneven. The softmax is computed whole, so the result is that of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sfm.model.blocks import Attend, attend_local
from sfm.model.masking import visible_per_row
from sfm.model.patches import Grid
from sfm.parallel.mesh import Mesh
from sfm.parallel.slab import slab_rows


class Attends(NamedTuple):
    """Attention for the two stacks of the model, whose lengths differ."""

    encoder: Attend
    decoder: Attend


def attends(mesh: Mesh, grid: Grid, ratio: float) -> Attends:
    """Attention functions for this rank's slab of a window of `grid` patches masked at `ratio`."""
    if mesh.context_group is None:
        return Attends(attend_local, attend_local)
    slabs = [slab_rows(grid[0], mesh.context, rank) for rank in range(mesh.context)]
    per_row = visible_per_row(grid, ratio)
    visible = [sum(per_row[row] for row in slab) for slab in slabs]
    tokens = [len(slab) * grid[1] * grid[2] for slab in slabs]
    return Attends(GatherAttend(mesh.context_group, visible), GatherAttend(mesh.context_group, tokens))


class GatherAttend:
    """Attend with local queries to the keys and values of every rank of `group`.

    Args:
        lengths: tokens on each rank of the group, in rank order.
    """

    def __init__(self, group: dist.ProcessGroup, lengths: Sequence[int]) -> None:
        self.group, self.lengths = group, list(lengths)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = _Gather.apply(torch.stack([k, v]), self.group, self.lengths)  # [2, B, H, N of all ranks, D]
        return F.scaled_dot_product_attention(q, kv[0], kv[1])


class _Gather(torch.autograd.Function):
    """[2, B, H, n, D] of each rank -> [2, B, H, sum n, D] on every rank; gradients are summed back to their owners."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup, lengths: list[int]) -> Tensor:
        ctx.group, ctx.lengths = group, lengths
        longest = max(lengths)
        # Collectives want equal blocks: the shorter shards are padded, and the padding is cut off before use.
        block = F.pad(local, (0, 0, 0, longest - local.shape[3])).contiguous()
        blocks = block.new_empty(len(lengths), *block.shape)
        dist.all_gather_single(blocks.flatten(0, 1), block, group=group)
        return torch.cat([b[..., :n, :] for b, n in zip(blocks, lengths, strict=True)], dim=3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        lengths, longest = ctx.lengths, max(ctx.lengths)
        shards = grads[0].split(lengths, dim=3)
        blocks = torch.stack([F.pad(s, (0, 0, 0, longest - s.shape[3])) for s in shards])
        own = torch.empty_like(blocks[0])
        dist.reduce_scatter_single(own, blocks.flatten(0, 1), group=ctx.group)
        rank = dist.get_rank(ctx.group)
        return own[..., : lengths[rank], :], None, None
