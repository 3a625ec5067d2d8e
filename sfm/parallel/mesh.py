"""The (data, context) mesh of training processes.

Ranks of one context group are neighbours (rank = data rank * context degree + context rank), so that on a cluster they
share a node first. In hybrid mode a context group is itself a mesh: `ulysses` neighbours trade heads, and
the ranks at the same place of each such group form a ring.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Mesh:
    """This process's place. A group of one is None."""

    world: int
    rank: int
    context: int
    """Context-parallel degree."""
    context_group: dist.ProcessGroup | None
    ulysses: int = 1
    """Neighbours that trade heads, in hybrid mode."""
    ulysses_group: dist.ProcessGroup | None = None
    ring_group: dist.ProcessGroup | None = None

    @property
    def data(self) -> int:
        """Data-parallel degree."""
        return self.world // self.context

    @property
    def data_rank(self) -> int:
        return self.rank // self.context

    @property
    def context_rank(self) -> int:
        return self.rank % self.context


def build_mesh(context: int, ulysses: int = 1) -> Mesh:
    """Split the initialised world into context groups, and these for hybrid mode. Collective: every rank calls it.

    Raises:
        ValueError: a degree does not divide what it splits.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % context or context % ulysses:
        raise ValueError(f"context degree {context} must divide {world} processes, and be a multiple of {ulysses}")
    firsts = range(0, world, context)
    whole = _own_group(range(first, first + context) for first in firsts)
    if ulysses == 1:
        return Mesh(world, rank, context, whole)
    heads = _own_group(range(first, first + ulysses) for first in range(0, world, ulysses))
    rings = _own_group(range(f + place, f + context, ulysses) for f in firsts for place in range(ulysses))
    return Mesh(world, rank, context, whole, ulysses, heads, rings)


def _own_group(groups: Iterable[range]) -> dist.ProcessGroup | None:
    """Make every group (all ranks must, in the same order); return the one that holds this rank."""
    own = None
    for members in groups:
        if len(members) > 1:
            group = dist.new_group(list(members))
            if dist.get_rank() in members:
                own = group
    return own
