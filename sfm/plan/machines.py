"""What GPUs can do, by their vendors' data sheets (SXM boards). Bytes and seconds; a TB is 10^12 bytes."""

from __future__ import annotations

import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """One GPU in a machine of eight, as clouds rent them."""

    memory: float
    """Bytes of device memory, as its driver reports them (at the least, where cards differ)."""
    bf16: float
    """Dense bf16 operations per second."""
    fp32: float
    """Operations per second of fp32 products without tensor cores."""
    link: float
    """Bytes per second that it sends to its neighbours in the machine (NVLink, one way)."""
    network: float
    """Bytes per second that it sends to other machines: its eighth of theirs."""


GPUS = {
    "A100": Gpu(79 * 2**30, 312e12, 19.5e12, 300e9, 6.25e9),  # p4de.24xlarge, 400 Gb/s
    "H100": Gpu(79 * 2**30, 989.5e12, 67e12, 450e9, 50e9),  # p5.48xlarge, 3,200 Gb/s
    "H200": Gpu(139 * 2**30, 989.5e12, 67e12, 450e9, 50e9),  # p5e and p5en.48xlarge
    "B200": Gpu(178 * 2**30, 2250e12, 80e12, 900e9, 50e9),  # p6-b200.48xlarge
    "B300": Gpu(262 * 2**30, 2250e12, 80e12, 900e9, 100e9),  # p6-b300.48xlarge, 6,400 Gb/s
}

GPUS_PER_MACHINE = 8


def gpu_of(device_name: str) -> str | None:
    """The name in GPUS of a device that calls itself `device_name`, as "NVIDIA H100 80GB HBM3" or "A100-SXM4-80GB"."""
    return next((known for known in GPUS if known in re.split(r"[\s-]", device_name)), None)
