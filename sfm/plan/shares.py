"""How the tokens of one sample are shared by the context-parallel ranks: whole patch rows, and a part of the registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sfm.spec import JobSpec, visible_tokens

Grid = tuple[int, int, int]


def slab_rows(rows: int, degree: int, rank: int) -> range:
    """Patch rows along inline that `rank` of `degree` owns: contiguous, and no two ranks differ by more than one row."""
    return range(rank * rows // degree, (rank + 1) * rows // degree)


def visible_per_row(grid: Grid, ratio: float) -> list[int]:
    """Visible tokens in each patch row: as equal as whole numbers allow, summing to the sample's count."""
    rows, per_row = grid[0], grid[1] * grid[2]
    visible = visible_tokens(rows * per_row, ratio)
    ends = [(row + 1) * visible // rows for row in range(rows)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def predicted_per_row(grid: Grid, ratio: float, share: float) -> list[int]:
    """Masked tokens of each patch row that are predicted: this share of them, rounded to nearest, at least one."""
    masked = [grid[1] * grid[2] - visible for visible in visible_per_row(grid, ratio)]
    return [max(1, int(share * n + 0.5)) for n in masked]


class Shares(NamedTuple):
    """Tokens of one sample on each context rank, in rank order."""

    voxels: list[int]
    """Voxels of the slab."""
    registers: list[range]
    """Which registers."""
    encoder: list[int]
    """Visible tokens and registers."""
    predicted: list[int]
    """Masked tokens that a training step predicts."""
    queries: list[int]
    """Tokens that the decoder works on."""
    keys: list[int]
    """Tokens that the decoder's attention looks at."""


def shares(spec: JobSpec, predict: float | None = None) -> Shares:
    """Share out one sample of `spec`.

    Args:
        predict: share of the masked tokens that are predicted; default: what training does.
    """
    degree, grid = spec.parallel.context, spec.grid
    predict = spec.model.decode_share if predict is None else predict
    slabs = [slab_rows(grid[0], degree, rank) for rank in range(degree)]
    registers = [slab_rows(spec.model.registers, degree, rank) for rank in range(degree)]

    def per_rank(per_row: Sequence[int]) -> list[int]:
        return [sum(per_row[row] for row in slab) for slab in slabs]

    visible = per_rank(visible_per_row(grid, spec.mask_ratio))
    predicted = per_rank(predicted_per_row(grid, spec.mask_ratio, predict))
    voxels = [len(slab) * spec.model.patch[0] * spec.window.shape[1] * spec.window.shape[2] for slab in slabs]
    encoder = [n + len(own) for n, own in zip(visible, registers, strict=True)]
    whole = [n + m for n, m in zip(encoder, predicted, strict=True)]  # without a share, predicted are all the masked
    queries, keys = (predicted, encoder) if spec.model.decoder_attention == "cross" else (whole, whole)
    return Shares(voxels, registers, encoder, predicted, queries, keys)
