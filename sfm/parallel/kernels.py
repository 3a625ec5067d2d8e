"""Attention kernels that also give the log-sum-exp, so that partial results over blocks of keys can be merged.

A merged result needs each block's output and log-sum-exp; the backward pass of a block needs the *final* output and
log-sum-exp of its queries (Dao et al. 2022; Liu et al. 2023).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Partial(NamedTuple):
    """Attention of some queries to some keys."""

    out: Tensor
    """[B, H, q, D]."""
    lse: Tensor
    """[B, H, q] natural logarithm of the sum of exponentiated scores, at least float32."""


def kernel_name(device: torch.device, dtype: torch.dtype) -> str:
    """Which kernel serves tensors of this kind."""
    if device.type == "cpu":
        return "flash-cpu"
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        return "flash"
    return "math"


def forward(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Attend queries [B, H, q, D] to keys and values [B, H, k, D]."""
    name = kernel_name(q.device, q.dtype)
    if name == "flash-cpu":
        # Results of blocks are summed, so on a CPU, where bf16 is no faster, they are not rounded first.
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        return Partial(*aten._scaled_dot_product_flash_attention_for_cpu(q, k, v))
    if name == "flash":
        return Partial(*aten._scaled_dot_product_flash_attention(q, k, v)[:2])
    scores = (q @ k.mT) / math.sqrt(q.shape[-1])
    return Partial(torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1))


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Partial) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through one block of keys, given the result `whole` over all blocks."""
    name = kernel_name(q.device, q.dtype)
    if name == "flash-cpu":
        inputs = (x.to(whole.lse.dtype) for x in (grad, q, k, v, whole.out))
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, whole.lse, 0.0, False)
    if name == "flash":
        none = torch.zeros((), dtype=torch.uint64, device=q.device)  # no dropout, hence no random state
        lengths = (q.shape[2], k.shape[2])
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, *whole, None, None, *lengths, 0.0, False, none, none
        )
    scale = 1 / math.sqrt(q.shape[-1])
    weights = torch.exp((q @ k.mT) * scale - whole.lse[..., None])
    inner = (grad * whole.out).sum(-1, keepdim=True)
    scores = weights * (grad @ v.mT - inner) * scale
    return scores @ k, scores.mT @ q, weights.mT @ grad


def merge(one: Partial, two: Partial) -> Partial:
    """The result over both blocks of keys, in at least float32."""
    lse = torch.logaddexp(one.lse, two.lse)
    exact = torch.promote_types(one.out.dtype, torch.float32)
    out = one.out.to(exact) * (one.lse - lse).exp()[..., None] + two.out.to(exact) * (two.lse - lse).exp()[..., None]
    return Partial(out, lse)
