"""Context parallelism by trading heads: each rank attends whole sequences of a few heads (Jacobs et al. 2023).

An all-to-all turns [all heads, own tokens] into [own heads, all tokens], and another turns the result back.
The group's size must divide the heads; the tokens may be uneven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sfm.model.blocks import Attend, attend_local

Move = Callable[[Tensor, dist.ProcessGroup, list[int]], Tensor]


class UlyssesAttend:
    """Trade tokens for heads within `group`, attend with `inner`, trade back.

    Args:
        lengths: tokens on each rank of the group, in rank order.
        inner: attention over the tokens of the group; itself distributed in hybrid mode.
    """

    def __init__(self, group: dist.ProcessGroup, lengths: Sequence[int], inner: Attend = attend_local) -> None:
        self.group, self.lengths, self.inner = group, list(lengths), inner

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        qkv = _Trade.apply(
            torch.stack([q, k, v]), _to_heads, _to_tokens, self.group, self.lengths
        )  # [3, B, H / P, N, D]
        out = self.inner(qkv[0], qkv[1], qkv[2])
        return _Trade.apply(out[None], _to_tokens, _to_heads, self.group, self.lengths)[0]


def _to_heads(x: Tensor, group: dist.ProcessGroup, lengths: list[int]) -> Tensor:
    """[S, B, H, own tokens, D] -> [S, B, H / P, tokens of the group, D]."""
    size = len(lengths)
    sent = torch.stack(x.chunk(size, dim=2)).flatten()  # one block of heads for each rank
    per_token = sent.numel() // (size * x.shape[3])
    received = x.new_empty(per_token * sum(lengths))
    splits = [per_token * n for n in lengths]
    dist.all_to_all_single(received, sent, splits, [sent.numel() // size] * size, group=group)
    shape = (x.shape[0], x.shape[1], x.shape[2] // size)
    return torch.cat([part.view(*shape, n, -1) for part, n in zip(received.split(splits), lengths, strict=True)], dim=3)


def _to_tokens(x: Tensor, group: dist.ProcessGroup, lengths: list[int]) -> Tensor:
    """The inverse of :func:`_to_heads`."""
    size, own = len(lengths), lengths[dist.get_rank(group)]
    parts = [part.flatten() for part in x.split(lengths, dim=3)]  # one block of tokens for each rank
    block = x.numel() // x.shape[3] * own
    received = x.new_empty(block * size)
    dist.all_to_all_single(received, torch.cat(parts), [block] * size, [p.numel() for p in parts], group=group)
    return received.view(size, *x.shape[:3], own, -1).permute(1, 2, 0, 3, 4, 5).flatten(2, 3)


class _Trade(torch.autograd.Function):
    """`there` in the forward pass; `back`, its inverse and so its transpose, in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move, group: dist.ProcessGroup, lengths: list[int]) -> Tensor:
        ctx.back, ctx.group, ctx.lengths = back, group, lengths
        return there(x, group, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(grads[0], ctx.group, ctx.lengths), None, None, None, None
