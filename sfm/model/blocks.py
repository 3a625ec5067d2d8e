"""Pre-norm Transformer blocks. Attention has a single door: the function `attend` that is handed in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from sfm.model.positions import rotate
from sfm.plan.tiles import HIDDEN_TILE
from sfm.spec import Transformer

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [B, H, N, D], k and v [B, H, K, D]) of this device's tokens -> [B, H, N, D]; may look at other devices' keys
and values. N differs from K where queries are other tokens than keys."""

Rotation = tuple[Tensor, Tensor] | None


class Memory(NamedTuple):
    """Tokens that others attend to."""

    tokens: Tensor
    """[B, K, C]."""
    rotation: Rotation


def attend_local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full attention among the tokens of this device."""
    return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    """Multi-head attention among tokens, or of tokens to a memory.

    Args:
        cross: keys and values come from a memory.
        qk_norm: normalise queries and keys of each head, before rotation, by their root mean square: without it
            logits grow until training diverges in large models (Dehghani et al. 2023, ViT-22B; its norm has
            neither centring nor bias, that is RMSNorm, Zhang & Sennrich 2019).
    """

    def __init__(self, size: Transformer, *, qk_norm: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.heads = size.heads
        if cross:
            self.q = nn.Linear(size.width, size.width)
            self.kv = nn.Linear(size.width, 2 * size.width)
        else:
            self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.q_norm, self.k_norm = (_head_norm(size) if qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend, memory: Memory | None = None) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        if memory is None:
            q, k, v = self._split(self.qkv(x))  # each [B, H, N, D]
            of_keys = rotation
        else:
            (q,), (k, v) = self._split(self.q(x)), self._split(self.kv(memory.tokens))  # [B, H, N, D], [B, H, K, D]
            of_keys = memory.rotation
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None and of_keys is not None:
            q, k = rotate(q, rotation), rotate(k, of_keys)
        return self.out(attend(q, k, v).transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> list[Tensor]:
        """[B, N, S C] -> S times [B, H, N, D]; so cut, the gradients are put together again in one copy."""
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in x.split(self.out.in_features, -1)]


def _head_norm(size: Transformer) -> nn.Module:
    return nn.RMSNorm(size.width // size.heads, eps=1e-6)


class Up(nn.Linear):
    """First layer of a feed-forward. It is called with the second, and computed inside of that.

    So each is called once, however many tiles there are. Engines that shard weights gather them when a module is
    called, all ranks together, and ranks whose slabs differ in length have different numbers of tiles.
    """

    def forward(self, x: Tensor, down: Down, tiled: bool = False) -> Tensor:  # type: ignore[override]
        """[B, N, C] -> [B, N, C]."""
        return down(x, self, tiled)


class Down(nn.Linear):
    """Second layer of a feed-forward, and the way through both."""

    def forward(self, x: Tensor, up: Up, tiled: bool = False) -> Tensor:  # type: ignore[override]
        """[B, N, C] -> [B, N, C]; `tiled` holds the hidden layer of no more than :data:`HIDDEN_TILE` tokens at a time."""
        length = max(1, HIDDEN_TILE // len(x))
        if not tiled or x.shape[1] <= length:
            return F.linear(F.gelu(F.linear(x, up.weight, up.bias)), self.weight, self.bias)
        return _in_tiles(x, up.weight, up.bias, self.weight, self.bias, length)


@torch.compiler.disable  # matrix products need no compiler, and every tile would be compiled
def _in_tiles(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, length: int) -> Tensor:
    return _Tiled.apply(x, up, up_bias, down, down_bias, length)


class _Tiled(torch.autograd.Function):
    """A feed-forward over tiles of tokens, whose hidden layer is forgotten and made again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, length: int
    ) -> Tensor:
        ctx.save_for_backward(x, up, up_bias, down)
        ctx.length = length
        out = torch.empty_like(x)
        for tile, into in zip(x.split(length, 1), out.split(length, 1), strict=True):
            into.copy_(F.linear(F.gelu(F.linear(tile, up, up_bias)), down, down_bias))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, up, up_bias, down = ctx.saved_tensors
        exact = torch.promote_types(x.dtype, torch.float32)  # sums over tiles are kept in it
        dx = torch.empty_like(x)
        dup, dup_bias, ddown = (torch.zeros_like(weight, dtype=exact) for weight in (up, up_bias, down))
        ddown_bias = grads[0].sum((0, 1), dtype=exact)
        for tile, grad, into in zip(*(t.split(ctx.length, 1) for t in (x, grads[0], dx)), strict=True):
            hidden = F.linear(tile, up, up_bias)  # [B, n, mlp]
            ddown += grad.flatten(0, 1).T @ F.gelu(hidden).flatten(0, 1)
            dhidden = torch.ops.aten.gelu_backward(grad @ down, hidden)
            dup += dhidden.flatten(0, 1).T @ tile.flatten(0, 1)
            dup_bias += dhidden.sum((0, 1), dtype=exact)
            into.copy_(dhidden @ up)
        return dx, dup.to(up.dtype), dup_bias.to(up.dtype), ddown.to(down.dtype), ddown_bias.to(down.dtype), None


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)).

    Args:
        qk_norm, cross: as in :class:`Attention`.
        tiled: the hidden layer of the feed-forward is made in tiles (:class:`Down`).
    """

    def __init__(self, size: Transformer, *, qk_norm: bool = False, cross: bool = False, tiled: bool = False) -> None:
        super().__init__()
        self.tiled = tiled
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size, qk_norm=qk_norm, cross=cross)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = Up(size.width, size.mlp)
        self.down = Down(size.mlp, size.width)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend, memory: Memory | None = None) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        x = x + self.attention(self.norm1(x), rotation, attend, memory)
        return x + self.up(self.norm2(x), self.down, self.tiled)


class Stack(nn.Module):
    """`depth` blocks and a final norm.

    Args:
        qk_norm, cross: as in :class:`Attention`.
        recompute: keep only the input of each block and compute the block again in the backward pass
            (Chen et al. 2016), its feed-forward in tiles; whatever `attend` exchanges is exchanged again, in the
            same order on every device.
        keep_attention: keep what attention gave as well, and compute all but that again.
        offload: keep those inputs in the host's memory (:class:`Offloaded`).
    """

    def __init__(
        self,
        size: Transformer,
        *,
        qk_norm: bool = False,
        cross: bool = False,
        recompute: bool = False,
        keep_attention: bool = False,
        offload: bool = False,
    ) -> None:
        super().__init__()
        self.recompute, self.offload = recompute, offload
        self.contexts = _keeping_attention if keep_attention else noop_context_fn
        blocks = (Block(size, qk_norm=qk_norm, cross=cross, tiled=recompute) for _ in range(size.depth))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(size.width)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend, memory: Memory | None = None) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                with Offloaded(x) if self.offload else nullcontext():
                    x = checkpoint(
                        block,
                        x,
                        rotation,
                        attend,
                        memory,
                        use_reentrant=False,
                        preserve_rng_state=False,
                        context_fn=self.contexts,
                    )
            else:
                x = block(x, rotation, attend, memory)
        return self.norm(x)


def _keeping_attention() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Around a block's first and second pass: the fused kernels of attention run in the first alone."""
    aten = torch.ops.aten
    kernels: list[Any] = [
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
    ]
    return create_selective_checkpoint_contexts(kernels)


class Offloaded(saved_tensors_hooks):
    """Where autograd would keep `x`, it keeps a copy in the host's memory, and fetches it back when it is needed.

    Other tensors that are kept (what all blocks share: rotations, memory, weights) stay where they are. On a device
    whose memory is the host's, so does `x`.
    """

    def __init__(self, x: Tensor) -> None:
        place, shape = x.data_ptr(), x.shape  # autograd hands over a view of x; x itself must not live on in here

        def pack(kept: Tensor) -> Tensor | OnHost:
            return to_host(kept) if kept.data_ptr() == place and kept.shape == shape else kept

        super().__init__(pack, lambda kept: kept.fetch() if isinstance(kept, OnHost) else kept)


class OnHost(NamedTuple):
    """A tensor of `device` that waits in the host's memory."""

    copy: Tensor
    device: torch.device

    def fetch(self) -> Tensor:
        torch.cuda.current_stream(self.device).wait_stream(_copies(self.device))  # it has arrived before it is read
        return self.copy.to(self.device, non_blocking=True)


def to_host(x: Tensor) -> Tensor | OnHost:
    """Begin to copy a tensor of a GPU to pinned memory, beside the GPU's other work; others are returned as they are."""
    if not x.is_cuda:
        return x
    stream = _copies(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))  # x is written before it is read
    copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    with torch.cuda.stream(stream):
        copy.copy_(x, non_blocking=True)
    x.record_stream(stream)  # its memory is not given away before it has left
    return OnHost(copy, x.device)


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
