"""Pre-norm Transformer blocks. Attention has a single door: the function `attend` that is handed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sfm.model.positions import rotate
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

    def _split(self, x: Tensor) -> Tensor:
        """[B, N, S C] -> [S, B, H, N, D]."""
        return x.unflatten(-1, (-1, self.heads, self.out.in_features // self.heads)).permute(2, 0, 3, 1, 4)


def _head_norm(size: Transformer) -> nn.Module:
    return nn.RMSNorm(size.width // size.heads, eps=1e-6)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, size: Transformer, *, qk_norm: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size, qk_norm=qk_norm, cross=cross)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, size.mlp)
        self.down = nn.Linear(size.mlp, size.width)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend, memory: Memory | None = None) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        x = x + self.attention(self.norm1(x), rotation, attend, memory)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    """`depth` blocks and a final norm.

    Args:
        qk_norm, cross: as in :class:`Attention`.
        recompute: keep only the input of each block and compute the block again in the backward pass
            (Chen et al. 2016); whatever `attend` exchanges is exchanged again, in the same order on every device.
    """

    def __init__(
        self, size: Transformer, *, qk_norm: bool = False, cross: bool = False, recompute: bool = False
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(Block(size, qk_norm=qk_norm, cross=cross) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend, memory: Memory | None = None) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, rotation, attend, memory, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rotation, attend, memory)
        return self.norm(x)
