"""Attention across the devices that share one window, behind one door: `attends(...)`.

Every mode takes the queries, keys and values of this rank's tokens, [B, H, n, D], and gives those queries what full
attention over the tokens of all ranks would. Shards may be uneven; no padding is ever attended to.

- gather: all keys and values on every rank, then one local attention.
- ring: keys and values travel from rank to rank; partial results are merged. Least memory.
- ulysses: ranks trade tokens for heads and attend whole sequences of a few heads. Fewest bytes; must divide the heads.
- hybrid: ulysses among neighbours, a ring between their groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sfm.model.blocks import Attend, attend_local
from sfm.model.masking import visible_per_row
from sfm.model.patches import Grid
from sfm.parallel.gather import GatherAttend
from sfm.parallel.mesh import Mesh
from sfm.parallel.ring import RingAttend
from sfm.parallel.slab import slab_rows
from sfm.parallel.ulysses import UlyssesAttend
from sfm.spec import ContextMode


class Attends(NamedTuple):
    """Attention for the two stacks of the model, whose lengths differ."""

    encoder: Attend
    decoder: Attend


def attends(mesh: Mesh, grid: Grid, ratio: float, mode: ContextMode = "gather") -> Attends:
    """Attention functions for this rank's slab of a window of `grid` patches masked at `ratio`."""
    slabs = [slab_rows(grid[0], mesh.context, rank) for rank in range(mesh.context)]
    per_row = visible_per_row(grid, ratio)
    visible = [sum(per_row[row] for row in slab) for slab in slabs]
    tokens = [len(slab) * grid[1] * grid[2] for slab in slabs]
    return Attends(attend_across(mesh, visible, mode), attend_across(mesh, tokens, mode))


def attend_across(mesh: Mesh, lengths: Sequence[int], mode: ContextMode) -> Attend:
    """The attention function of `mode` for tokens of which each context rank holds `lengths`."""
    group = mesh.context_group
    if group is None:
        return attend_local
    if mode == "gather":
        return GatherAttend(group, lengths)
    if mode == "ring":
        return RingAttend(group, lengths)
    if mode == "ulysses":
        return UlyssesAttend(group, lengths)
    assert mesh.ulysses_group is not None
    assert mesh.ring_group is not None
    width, rank = mesh.ulysses, mesh.context_rank
    groups = [list(lengths[first : first + width]) for first in range(0, mesh.context, width)]
    ring = RingAttend(mesh.ring_group, [sum(group) for group in groups])
    return UlyssesAttend(mesh.ulysses_group, groups[rank // width], ring)
