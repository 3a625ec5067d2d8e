"""Feed by Ray Data: a reader actor fills the object store ahead of its rank.

Each rank owns an ordered pipeline over its own sequence: positions -> samples -> windows. Ray Data sees
numbers only, so what it does never changes which window comes when.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import ray.data
from ray.data import ActorPoolStrategy

from sfm.feed.order import RankOrder
from sfm.feed.source import Columns, SampleSource
from sfm.spec import JobSpec

BLOCK_BYTES = 32 * 2**20  # Ray Data's cost is per block; smaller blocks starve it, larger ones come late


class _Reader:
    """Runs in an actor: turns the number of a block of positions into its windows."""

    def __init__(
        self,
        spec: dict[str, Any],
        statistics: Sequence[dict[str, Any]],
        rows: range,
        order: RankOrder,
        blocks: list[range],
    ) -> None:
        self.source = SampleSource(JobSpec.model_validate(spec), statistics, rows)
        self.order, self.blocks = order, blocks

    def __call__(self, numbers: dict[str, np.ndarray]) -> Columns:
        (block,) = numbers["item"]
        return self.source.training([self.order.sample(position) for position in self.blocks[block]])


def ray_feed(
    spec: JobSpec, statistics: Sequence[dict[str, Any]], rows: range, order: RankOrder, start: int, stop: int
) -> Generator[Columns, None, None]:
    """Micro-batches at positions `start` ... `stop` - 1 of a rank's sequence, in order. Runs inside the rank's worker."""
    window = 4 * math.prod(spec.window.shape) * len(rows) // spec.grid[0]  # bytes
    per_block = max(1, BLOCK_BYTES // window)
    blocks = [range(first, min(first + per_block, stop)) for first in range(start, stop, per_block)]
    if not blocks:
        return
    # Numbers made here need no task to read them: a task would wait for a CPU that the job never asked for.
    numbers = ray.data.from_items(list(range(len(blocks))), override_num_blocks=min(200, len(blocks)))
    dataset = numbers.map_batches(
        _Reader,
        fn_constructor_args=(spec.model_dump(mode="json"), list(statistics), rows, order, blocks),
        batch_size=1,
        compute=ActorPoolStrategy(size=1),
        num_cpus=spec.resources.reader_cpus,
    )
    dataset.context.execution_options.preserve_order = True
    dataset.context.target_max_block_size = BLOCK_BYTES
    dataset.context.enable_progress_bars = False
    yield from dataset.iter_batches(batch_size=spec.micro_batch, batch_format="numpy", prefetch_batches=2)
