"""Attention kernels that also give the log-sum-exp, so that partial results over blocks of keys can be merged.

A merged result needs each block's output and log-sum-exp; the backward pass of a block needs the *final* output and
log-sum-exp of its queries (Dao et al. 2022; Liu et al. 2023).

On GPUs, bf16 and fp16 take cuDNN's kernel (1.7 times as fast as flash on an H100 at 128 channels per head: Shah et al.
2024), else flash; fp32 takes PyTorch's memory-efficient kernel. A kernel that is not there, or does not compute the
formula, is passed over.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sfm.spec import SfmError

aten = torch.ops.aten


class KernelError(SfmError):
    """No attention kernel serves this job."""


class Partial(NamedTuple):
    """Attention of some queries to some keys."""

    out: Tensor
    """[B, H, q, D]."""
    lse: Tensor
    """[B, H, q] natural logarithm of the sum of exponentiated scores, at least float32."""


Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(NamedTuple):
    """One way to compute attention."""

    forward: Callable[[Tensor, Tensor, Tensor], Partial]
    """(q [B, H, q, D], k and v [B, H, k, D])."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Partial], Gradients]
    """(gradient of the output, q, k, v, result over all blocks) -> gradients of q, k, v through this block."""


def _cpu(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    # Results of blocks are summed, so on a CPU, where bf16 is no faster, they are not rounded first.
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    return Partial(*aten._scaled_dot_product_flash_attention_for_cpu(q, k, v))


def _cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Partial) -> Gradients:
    inputs = (x.to(whole.lse.dtype) for x in (grad, q, k, v, whole.out))
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, whole.lse, 0.0, False)


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[:2]
    return Partial(out, lse.view(q.shape[:3]))  # cuDNN's is [B, H, q, 1]


def _cudnn_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Partial) -> Gradients:
    none, lengths = _no_random_state(q), (q.shape[2], k.shape[2])
    lse = whole.lse.contiguous()[..., None]
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, whole.out, lse, none, none, None, None, None, *lengths, 0.0, False
    )


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    return Partial(*aten._scaled_dot_product_flash_attention(q, k, v)[:2])


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Partial) -> Gradients:
    none, lengths = _no_random_state(q, torch.uint64), (q.shape[2], k.shape[2])
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, *whole, None, None, *lengths, 0.0, False, none, none
    )


def _efficient(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[:2]
    return Partial(out, lse[..., : q.shape[2]])  # the kernel's goes on to a multiple of 32


def _efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Partial) -> Gradients:
    none = _no_random_state(q)
    lse = F.pad(whole.lse, (0, -whole.lse.shape[2] % 32), value=math.inf)  # beyond the queries no weight is left
    return aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, whole.out, lse, none, none, 0.0, [True, True, True, False]
    )[:3]


def _math(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    scores = (q @ k.mT) / math.sqrt(q.shape[-1])
    return Partial(torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1))


def _math_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Partial) -> Gradients:
    scale = 1 / math.sqrt(q.shape[-1])
    weights = torch.exp((q @ k.mT) * scale - whole.lse[..., None])
    inner = (grad * whole.out).sum(-1, keepdim=True)
    scores = weights * (grad @ v.mT - inner) * scale
    return scores @ k, scores.mT @ q, weights.mT @ grad


def _no_random_state(q: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros((), dtype=dtype, device=q.device)  # nothing is dropped at random


KERNELS = {
    "flash-cpu": Kernel(_cpu, _cpu_backward),
    "cudnn": Kernel(_cudnn, _cudnn_backward),
    "flash": Kernel(_flash, _flash_backward),
    "efficient": Kernel(_efficient, _efficient_backward),
    "math": Kernel(_math, _math_backward),
}


@functools.cache
def kernel_name(device: torch.device, dtype: torch.dtype, head_width: int) -> str:
    """Which kernel serves queries and keys of this kind: on a GPU the first, fastest first, that proves itself there."""
    if device.type == "cpu":
        return "flash-cpu"
    if device.type != "cuda" or dtype == torch.float64:
        return "math"
    candidates = ["efficient"] if dtype == torch.float32 else ["cudnn", "flash"]
    return next((name for name in candidates if _works(name, device, dtype, head_width)), "math")


def _works(name: str, device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Whether a kernel is there and equals the formula in fp64, forward and backward, at odd lengths."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, 2, n, head_width, dtype=dtype, device=device, generator=generator) for n in (333, 271, 271, 333)
    )
    try:
        part = KERNELS[name].forward(q, k, v)
        found = [*part, *KERNELS[name].backward(grad, q, k, v, part)]
    except RuntimeError:  # not built in, or not for this GPU, type or width
        return False
    q, k, v, grad = (x.double() for x in (q, k, v, grad))
    exact = _math(q, k, v)
    right = [*exact, *_math_backward(grad, q, k, v, exact)]
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    return all(bool((f - r).norm() <= limit * r.norm()) for f, r in zip(found, right, strict=True))


def pin(device: torch.device, dtype: torch.dtype, head_widths: Iterable[int]) -> str:
    """Choose the kernels of a job and return their names, for the log.

    Attention on one device, which PyTorch computes, is held to the same ones: left alone, it falls back in silence to
    a slower kernel where a library is missing. The choice is one of the whole process.

    Raises:
        KernelError: on a GPU, in bf16 or fp16, nothing but the plain formula is left, which holds all scores at once.
    """
    names = {width: kernel_name(device, dtype, width) for width in head_widths}
    if device.type == "cuda":
        for width, name in names.items():
            if name == "math" and dtype in (torch.bfloat16, torch.float16):
                raise KernelError(
                    f"no fused attention kernel works on {torch.cuda.get_device_name(device)} for {dtype} and heads of "
                    f"{width} channels: take heads of a multiple of 8 channels, at most 128 (width / heads of "
                    f"model.encoder and model.decoder); if they are, this PyTorch ({torch.__version__}, cuDNN "
                    f"{torch.backends.cudnn.version()}) does not fit the GPU or its driver"
                )
        torch.backends.cuda.enable_cudnn_sdp("cudnn" in names.values())
        torch.backends.cuda.enable_flash_sdp("flash" in names.values())
        torch.backends.cuda.enable_mem_efficient_sdp("efficient" in names.values())
        torch.backends.cuda.enable_math_sdp("math" in names.values())
    return ", ".join(sorted(set(names.values())))


def forward(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Attend queries [B, H, q, D] to keys and values [B, H, k, D]."""
    return KERNELS[kernel_name(q.device, q.dtype, q.shape[3])].forward(q, k, v)


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Partial) -> Gradients:
    """Gradients of q, k and v through one block of keys, given the result `whole` over all blocks."""
    return KERNELS[kernel_name(q.device, q.dtype, q.shape[3])].backward(grad, q, k, v, whole)


def merge(one: Partial, two: Partial) -> Partial:
    """The result over both blocks of keys, in at least float32."""
    lse = torch.logaddexp(one.lse, two.lse)
    exact = torch.promote_types(one.out.dtype, torch.float32)
    out = one.out.to(exact) * (one.lse - lse).exp()[..., None] + two.out.to(exact) * (two.lse - lse).exp()[..., None]
    return Partial(out, lse)
