"""Attention across the devices that share one window, behind one door: `attends(...)`.

Every mode takes the queries, keys and values of this rank's tokens, [B, H, n, D], and gives those queries what full
attention over the tokens of all ranks would. Shards may be uneven; no padding is ever attended to.

- gather: all keys and values on every rank, then one local attention.
- ring: keys and values travel from rank to rank; partial results are merged. Least memory.
- ulysses: ranks trade tokens for heads and attend whole sequences of a few heads. Fewest bytes; must divide the heads.
- hybrid: ulysses among neighbours, a ring between their groups.
- torch: PyTorch's own, for shards of one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sfm.model.blocks import Attend, attend_local
from sfm.parallel.gather import GatherAttend
from sfm.parallel.mesh import Mesh
from sfm.parallel.ring import RingAttend
from sfm.parallel.ulysses import UlyssesAttend
from sfm.plan.context import settle
from sfm.plan.shares import shares
from sfm.spec import ContextMode, JobSpec


class Attends(NamedTuple):
    """Attention for the two stacks of the model, whose lengths differ, and which registers are this rank's."""

    encoder: Attend
    decoder: Attend
    registers: slice


def attends(mesh: Mesh, spec: JobSpec, share: float | None = None, which: slice = slice(None)) -> Attends:
    """Attention functions for this rank's slab of the windows of `spec`, whose context degree is the mesh's.

    Args:
        share: of the masked tokens, how many are predicted; default: what training does.
        which: of these, where a cross-attention decoder is given only some of them; the same on every rank.
    """
    part, mode = shares(spec, share), settle(spec).parallel.context_mode
    own = part.registers[mesh.context_rank]
    decoder = attend_across(mesh, part.keys, mode, [len(range(n)[which]) for n in part.queries])
    return Attends(attend_across(mesh, part.encoder, mode), decoder, slice(own.start, own.stop))


def attend_across(mesh: Mesh, keys: Sequence[int], mode: ContextMode, queries: Sequence[int] | None = None) -> Attend:
    """The attention function of `mode` for tokens of which each context rank holds `keys`.

    Args:
        queries: queries on each context rank, where they are other tokens than the keys.
    """
    group = mesh.context_group
    queries = keys if queries is None else queries
    if group is None:
        return attend_local
    if mode == "gather":
        return GatherAttend(group, keys)
    if mode == "ring":
        return RingAttend(group, keys)
    if mode == "torch":
        assert len(set(keys)) == len(set(queries)) == 1  # as the spec demands
        from sfm.parallel.native import NativeAttend  # private names of torch: only who asks for them needs them

        return NativeAttend(group)
    if mode == "ulysses":
        return UlyssesAttend(group, keys, queries)
    assert mesh.ulysses_group is not None
    assert mesh.ring_group is not None
    width, rank = mesh.ulysses, mesh.context_rank
    ring = RingAttend(mesh.ring_group, [sum(keys[at : at + width]) for at in range(0, mesh.context, width)])
    first = rank // width * width
    neighbours = slice(first, first + width)
    return UlyssesAttend(mesh.ulysses_group, keys[neighbours], queries[neighbours], ring)
