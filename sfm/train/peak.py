"""How many operations per second a device can do: what a utilisation is a share of."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from sfm.plan.machines import GPUS, gpu_of


class Peak(NamedTuple):
    """The denominator of a model FLOPs utilisation."""

    flops: float
    """Operations per second of one device."""
    of: str
    """Where the figure comes from."""


def peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """The data sheet's dense rate of a known GPU, else the rate of a large matrix product on `device`, measured now."""
    kind = "bf16" if dtype == torch.bfloat16 else "fp32"
    if device.type == "cuda":
        name = gpu_of(torch.cuda.get_device_name(device))
        if name is not None:
            return Peak(getattr(GPUS[name], kind), f"{name}, dense {kind} of its data sheet")
    size = 8192 if device.type == "cuda" else 1024
    return Peak(_matrix_rate(device, dtype, size), f"a {size} x {size} {kind} matrix product measured on this device")


def _matrix_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Operations per second of the fastest of a few products of two [size, size] matrices."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    fastest = float("inf")
    for _ in range(4):  # the first warms up
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * size**3 / fastest
