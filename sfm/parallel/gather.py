"""Context parallelism by gathering: keep queries, gather the keys and values of all ranks, attend once.

The softmax is computed whole, so nothing is merged. The backward pass returns each rank the gradient of its own
keys and values, summed over all ranks (reduce-scatter).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sfm.parallel import kernels


class GatherAttend:
    """Attend with local queries to the keys and values of every rank of `group`.

    Args:
        lengths: keys on each rank of the group, in rank order.
    """

    def __init__(self, group: dist.ProcessGroup, lengths: Sequence[int]) -> None:
        self.group, self.lengths = group, list(lengths)

    @torch.compiler.disable  # to a compiler, what is exchanged is one opaque call
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Gathered.apply(q, torch.stack([k, v]), self.group, self.lengths)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, group: dist.ProcessGroup, lengths: list[int]) -> Tensor:
        ctx.group, ctx.lengths = group, lengths
        q, keys_values = q.contiguous(), _gather(kv, group, lengths)
        part = kernels.forward(q, keys_values[0], keys_values[1])
        out = part.out.to(q.dtype)
        ctx.save_for_backward(q, keys_values, out, part.lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        dq, *dkv = kernels.backward(grads[0].contiguous(), q, kv[0], kv[1], kernels.Partial(out, lse))
        return dq.to(q.dtype), _scatter(dkv, ctx.group, ctx.lengths).to(q.dtype), None, None


def _gather(local: Tensor, group: dist.ProcessGroup, lengths: list[int]) -> Tensor:
    """[2, B, H, n, D] of each rank -> [2, B, H, sum n, D] on every rank."""
    longest = max(lengths)
    # Collectives want equal blocks: the shorter shards are padded, and the padding is cut off before use.
    block = F.pad(local, (0, 0, 0, longest - local.shape[3])).contiguous()
    blocks = block.new_empty(len(lengths), *block.shape)
    dist.all_gather_single(blocks.flatten(0, 1), block, group=group)
    return torch.cat([b[..., :n, :] for b, n in zip(blocks, lengths, strict=True)], dim=3)


def _scatter(whole: Sequence[Tensor], group: dist.ProcessGroup, lengths: list[int]) -> Tensor:
    """Two [B, H, sum n, D] on every rank -> [2, B, H, n, D], summed over the ranks, in at least float32."""
    like, longest = whole[0], max(lengths)
    exact = torch.promote_types(like.dtype, torch.float32)
    blocks = like.new_zeros(len(lengths), 2, *like.shape[:2], longest, like.shape[3], dtype=exact)
    for part, tensor in enumerate(whole):
        for block, shard, n in zip(blocks, tensor.split(lengths, dim=2), lengths, strict=True):
            block[part, :, :, :n] = shard
    own = torch.empty_like(blocks[0])
    dist.reduce_scatter_single(own, blocks.flatten(0, 1), group=group)
    return own[..., : lengths[dist.get_rank(group)], :]
