"""How the patch rows of one window are shared by context-parallel ranks. Pure arithmetic."""

from __future__ import annotations


def slab_rows(rows: int, degree: int, rank: int) -> range:
    """Patch rows along inline that `rank` of `degree` owns: contiguous, and no two ranks differ by more than one row."""
    return range(rank * rows // degree, (rank + 1) * rows // degree)
