"""Context parallelism by a ring: keys and values travel, partial results are merged (Liu et al. 2023).

No rank ever holds more than two blocks of keys and values; the next one arrives while this one is worked on.
In the backward pass the blocks travel again, each followed by its gradient, which ends at its owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sfm.parallel import kernels


class RingAttend:
    """Attend with local queries to the keys and values of every rank of `group`, block by block.

    Args:
        lengths: keys on each rank of the group, in rank order.
    """

    def __init__(self, group: dist.ProcessGroup, lengths: Sequence[int]) -> None:
        self.group, self.lengths = group, list(lengths)

    @torch.compiler.disable  # to a compiler, what is exchanged is one opaque call
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Ring.apply(q, torch.stack([k, v]), self.group, self.lengths)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, group: dist.ProcessGroup, lengths: list[int]) -> Tensor:
        ctx.group, ctx.lengths = group, lengths
        q = q.contiguous()
        whole: kernels.Partial | None = None
        for _, block in _circulate(kv, group, lengths):
            part = kernels.forward(q, block[0], block[1])
            whole = part if whole is None else kernels.merge(whole, part)
        assert whole is not None
        out = whole.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, whole.lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        group, lengths, grad = ctx.group, ctx.lengths, grads[0].contiguous()
        exact = torch.promote_types(q.dtype, torch.float32)  # sums over ranks are kept in it
        dq = torch.zeros_like(q, dtype=exact)
        arriving: _Exchange | None = None
        for source, block in _circulate(kv, group, lengths):
            dq_part, dk, dv = kernels.backward(grad, q, block[0], block[1], kernels.Partial(out, lse))
            dq += dq_part
            dkv = torch.stack([dk, dv]).to(exact)
            if arriving is not None:
                dkv += arriving.wait()  # what the ranks before us added to this block's gradient
            arriving = _Exchange(dkv, group, lengths[source - 1], tag=1)
        assert arriving is not None
        return dq.to(q.dtype), arriving.wait().to(kv.dtype), None, None


class _Exchange:
    """Sends a block [2, B, H, n, D] to the next rank of the ring and receives one of `length` from the one before."""

    def __init__(self, block: Tensor, group: dist.ProcessGroup, length: int, tag: int) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        self.sent = block  # alive until it has left
        self.incoming = block.new_empty(*block.shape[:3], length, block.shape[4])
        operations = [
            dist.P2POp(dist.isend, self.sent, after, group, tag),
            dist.P2POp(dist.irecv, self.incoming, before, group, tag),
        ]
        self.works = dist.batch_isend_irecv(operations)

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.incoming


def _circulate(own: Tensor, group: dist.ProcessGroup, lengths: list[int]) -> Iterator[tuple[int, Tensor]]:
    """(owner, block) of every rank, this one's first; the next block travels while the caller works."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    block = own.contiguous()
    for step in range(size):
        source = (rank - step) % size
        last = step + 1 == size
        following = None if last else _Exchange(block, group, lengths[source - 1], tag=0)
        yield source, block
        if following is not None:
            block = following.wait()
