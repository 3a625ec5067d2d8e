"""Cutting windows into patches. A token is one patch; its number runs inline-major over the grid."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Grid = tuple[int, int, int]


def coordinates(tokens: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Grid coordinates (inline, crossline, sample) of token numbers, each of `tokens`' shape."""
    _, crosslines, samples = grid
    return tokens // (crosslines * samples), tokens // samples % crosslines, tokens % samples


def gather_patches(voxels: Tensor, tokens: Tensor, patch: tuple[int, int, int], first_row: int = 0) -> Tensor:
    """Copy the patches `tokens` out of each window; nothing else of the window is copied.

    Args:
        voxels: [B, I, X, T], the slab of the window that begins at patch row `first_row`.
        tokens: [B, N] int64 token numbers in the whole window, all inside the slab.
        patch: voxels of a patch along each axis; divides (I, X, T).

    Returns:
        [B, N, P] with P the volume of a patch.
    """
    grid = tuple(n // p for n, p in zip(voxels.shape[1:], patch, strict=True))
    view = voxels.unflatten(3, (grid[2], patch[2])).unflatten(2, (grid[1], patch[1])).unflatten(1, (grid[0], patch[0]))
    view = view.permute(0, 1, 3, 5, 2, 4, 6)  # [B, gi, gx, gt, pi, px, pt]: still no copy
    row, crossline, sample = coordinates(tokens, (grid[0], grid[1], grid[2]))
    sample_of_batch = torch.arange(len(tokens), device=tokens.device)[:, None]
    return view[sample_of_batch, row - first_row, crossline, sample].flatten(2)


def scatter_patches(patches: Tensor, tokens: Tensor, window: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """Write `patches` [B, N, P] at `tokens` [B, N] into a copy of `window` [B, I, X, T]; the inverse of gathering."""
    out = window.clone()
    grid = tuple(n // p for n, p in zip(window.shape[1:], patch, strict=True))
    view = out.unflatten(3, (grid[2], patch[2])).unflatten(2, (grid[1], patch[1])).unflatten(1, (grid[0], patch[0]))
    view = view.permute(0, 1, 3, 5, 2, 4, 6)
    row, crossline, sample = coordinates(tokens, (grid[0], grid[1], grid[2]))
    sample_of_batch = torch.arange(len(tokens), device=tokens.device)[:, None]
    view[sample_of_batch, row, crossline, sample] = patches.unflatten(2, patch).to(out.dtype)
    return out


def patch_volume(patch: tuple[int, int, int]) -> int:
    """Voxels of one patch."""
    return math.prod(patch)
