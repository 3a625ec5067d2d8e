"""Cutting windows into patches. A token is one patch; its number runs inline-major over the grid."""

from __future__ import annotations

import torch
from torch import Tensor

from sfm.plan.shares import Grid


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
    _, rows, crosslines, samples = voxels.shape
    runs = voxels.reshape(-1, patch[2])  # what of a trace lies in one patch, contiguous in memory
    window, row, crossline, sample = _places(voxels, tokens, patch, first_row)
    per_trace = samples // patch[2]
    first = ((window * rows + row * patch[0]) * crosslines + crossline * patch[1]) * per_trace + sample  # [B, N]
    inline, cross = (torch.arange(n, device=tokens.device) for n in patch[:2])
    step = (inline[:, None] * crosslines + cross) * per_trace  # [pi, px], from the first run of a patch to each other
    places = first[..., None] + step.flatten()  # [B, N, pi px]
    return runs.index_select(0, places.flatten()).view(*tokens.shape, -1)


def scatter_patches(patches: Tensor, tokens: Tensor, window: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """Write `patches` [B, N, P] at `tokens` [B, N] into a copy of `window` [B, I, X, T]; the inverse of gathering."""
    out = window.clone()
    _cut(out, patch)[_places(out, tokens, patch)] = patches.unflatten(2, patch).to(out.dtype)
    return out


def _cut(voxels: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """[B, I, X, T] -> [B, gi, gx, gt, pi, px, pt], a view: nothing is copied."""
    view = voxels.unflatten(3, (-1, patch[2])).unflatten(2, (-1, patch[1])).unflatten(1, (-1, patch[0]))
    return view.permute(0, 1, 3, 5, 2, 4, 6)


def _places(voxels: Tensor, tokens: Tensor, patch: tuple[int, int, int], first_row: int = 0) -> tuple[Tensor, ...]:
    """Index of `tokens` [B, N] in what :func:`_cut` makes of the slab `voxels` that begins at patch row `first_row`."""
    _, rows, crosslines, samples = voxels.shape
    grid = (rows // patch[0], crosslines // patch[1], samples // patch[2])
    row, crossline, sample = coordinates(tokens, grid)
    return torch.arange(len(tokens), device=tokens.device)[:, None], row - first_row, crossline, sample
