"""Context parallelism by trading heads: each rank attends whole sequences of a few heads (Jacobs et al. 2023).

An all-to-all turns [all heads, own tokens] into [own heads, all tokens], and another turns the result back.
The group's size must divide the heads; the tokens may be uneven, and queries may be other tokens than keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sfm.model.blocks import Attend, attend_local

Lengths = Sequence[Sequence[int]]  # of each tensor that moves: its tokens on each rank of the group
Move = Callable[[Sequence[Tensor], dist.ProcessGroup, Lengths], tuple[Tensor, ...]]


class UlyssesAttend:
    """Trade tokens for heads within `group`, attend with `inner`, trade back.

    Args:
        keys, queries: tokens on each rank of the group, in rank order.
        inner: attention over the tokens of the group; itself distributed in hybrid mode.
    """

    def __init__(
        self, group: dist.ProcessGroup, keys: Sequence[int], queries: Sequence[int], inner: Attend = attend_local
    ) -> None:
        self.group, self.keys, self.queries, self.inner = group, list(keys), list(queries), inner

    @torch.compiler.disable  # to a compiler, what is exchanged is one opaque call
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = _Trade.apply(_to_heads, _to_tokens, self.group, (self.queries, self.keys, self.keys), q, k, v)
        (out,) = _Trade.apply(_to_tokens, _to_heads, self.group, (self.queries,), self.inner(*whole))
        return out


def _to_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup, lengths: Lengths) -> tuple[Tensor, ...]:
    """[B, H, own tokens, D] each -> [B, H / P, tokens of the group, D]."""
    size = dist.get_world_size(group)
    sent = list(zip(*(x.chunk(size, dim=1) for x in tensors), strict=True))  # each rank's heads of every tensor
    shapes = [
        [(len(x), x.shape[1] // size, of[rank], x.shape[3]) for x, of in zip(tensors, lengths, strict=True)]
        for rank in range(size)
    ]
    return tuple(torch.cat(blocks, dim=2) for blocks in zip(*_exchange(sent, shapes, group), strict=True))


def _to_tokens(tensors: Sequence[Tensor], group: dist.ProcessGroup, lengths: Lengths) -> tuple[Tensor, ...]:
    """The inverse of :func:`_to_heads`."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    sent = list(zip(*(x.split(list(of), dim=2) for x, of in zip(tensors, lengths, strict=True)), strict=True))
    shapes = [[(*x.shape[:2], of[rank], x.shape[3]) for x, of in zip(tensors, lengths, strict=True)]] * size
    return tuple(torch.cat(blocks, dim=1) for blocks in zip(*_exchange(sent, shapes, group), strict=True))


def _exchange(
    sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """Send each rank of `group` its blocks and receive blocks of these `shapes` from it, all in one operation."""
    flat = torch.cat([block.flatten() for blocks in sent for block in blocks])
    outgoing = [sum(block.numel() for block in blocks) for blocks in sent]
    incoming = [sum(map(math.prod, of_rank)) for of_rank in shapes]
    received = flat.new_empty(sum(incoming))
    dist.all_to_all_single(received, flat, incoming, outgoing, group=group)
    pieces = iter(received.split([math.prod(shape) for of_rank in shapes for shape in of_rank]))
    return [[next(pieces).view(shape) for shape in of_rank] for of_rank in shapes]


class _Trade(torch.autograd.Function):
    """`there` in the forward pass; `back`, its inverse and so its transpose, in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, there: Move, back: Move, group: dist.ProcessGroup, lengths: Lengths, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back, ctx.group, ctx.lengths = back, group, lengths
        return there(tensors, group, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, None, *ctx.back(grads, ctx.group, ctx.lengths))
