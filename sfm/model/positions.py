"""Where a token is: factorised 3D sine-cosine codes, or rotary positions over three axes."""

from __future__ import annotations

import torch
from torch import Tensor

from sfm.model.patches import Grid, coordinates

_BASE = 10_000.0  # longest wavelength / 2 pi, in patches (Vaswani et al. 2017)


def _angles(position: Tensor, frequencies: int, dtype: torch.dtype) -> Tensor:
    """[...] positions -> [..., frequencies] angles, wavelengths spaced evenly in the logarithm."""
    steps = torch.arange(frequencies, device=position.device, dtype=dtype) / max(frequencies, 1)
    return position.to(dtype)[..., None] * _BASE**-steps


def sincos(tokens: Tensor, grid: Grid, width: int, dtype: torch.dtype) -> Tensor:
    """Codes to add to tokens: a third of the channels for each axis, the few left over are zero.

    Args:
        tokens: [B, N] token numbers.

    Returns:
        [B, N, width] of `dtype`; computed in at least float32.
    """
    exact = torch.promote_types(dtype, torch.float32)
    frequencies = width // 6
    parts = []
    for axis in coordinates(tokens, grid):
        angle = _angles(axis, frequencies, exact)
        parts += [angle.sin(), angle.cos()]
    codes = torch.cat(parts, dim=-1)
    return torch.nn.functional.pad(codes, (0, width - codes.shape[-1])).to(dtype)


def rotary(tokens: Tensor, grid: Grid, head_width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotation of each channel pair (Su et al. 2021, one axis per third of the pairs).

    Pairs left over when three does not divide are not rotated.

    Returns:
        two tensors [B, 1, N, head_width / 2] of `dtype`.
    """
    exact = torch.promote_types(dtype, torch.float32)
    pairs = head_width // 2
    angle = torch.cat([_angles(axis, pairs // 3, exact) for axis in coordinates(tokens, grid)], dim=-1)
    angle = torch.nn.functional.pad(angle, (0, pairs - angle.shape[-1]))[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn channel pairs of queries or keys [B, H, N, D] by `rotation`."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)  # pair c is (channel c, channel c + D/2)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
