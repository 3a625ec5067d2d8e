"""The (data, context) mesh of training processes.

Ranks of one context group are neighbours (rank = data_rank * context + context_rank), so that on a
cluster they share a node first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Mesh:
    """This process's place. `context_group` is None where the context degree is 1."""

    world: int
    rank: int
    context: int
    context_group: dist.ProcessGroup | None

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


def build_mesh(context: int) -> Mesh:
    """Split the initialised world into context groups. Collective: every rank calls it.

    Raises:
        ValueError: the degree does not divide the world.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % context:
        raise ValueError(f"context degree {context} does not divide the {world} processes of this job")
    group = None
    if context > 1:
        for first in range(0, world, context):  # every rank must create every group, in the same order
            members = dist.new_group(list(range(first, first + context)))
            if first <= rank < first + context:
                group = members
    return Mesh(world, rank, context, group)
