"""Feed by Ray Data: a reader actor fills the object store ahead of its rank.

Each rank owns an ordered pipeline over its own sequence: positions -> samples -> windows. Ray Data sees
numbers only, so what it does never changes which window comes when.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray.data
from ray.data import ActorPoolStrategy

from sfm.feed.order import RankOrder
from sfm.feed.source import Columns, SampleSource
from sfm.spec import JobSpec

BLOCK_BYTES = 32 * 2**20  # Ray Data's cost is per block; smaller blocks starve it, larger ones come late


class _Reader:
    """Runs in an actor: turns positions of a rank's sequence, counted from `start`, into windows."""

    def __init__(
        self, spec: dict[str, Any], statistics: Sequence[dict[str, Any]], rows: range, order: RankOrder, start: int
    ) -> None:
        self.source = SampleSource(JobSpec.model_validate(spec), statistics, rows)
        self.order, self.start = order, start

    def __call__(self, positions: dict[str, np.ndarray]) -> Columns:
        return self.source.training([self.order.sample(self.start + int(p)) for p in positions["id"]])


def ray_feed(
    spec: JobSpec, statistics: Sequence[dict[str, Any]], rows: range, order: RankOrder, start: int, stop: int
) -> Iterator[Columns]:
    """Micro-batches at positions `start` ... `stop` - 1 of a rank's sequence, in order. Runs inside the rank's worker."""
    window = 4 * math.prod(spec.window.shape) * len(rows) // spec.grid[0]  # bytes
    per_block = max(1, min(BLOCK_BYTES // window, stop - start))
    dataset = ray.data.range(stop - start, override_num_blocks=min(200, math.ceil((stop - start) / per_block)))
    dataset = dataset.map_batches(
        _Reader,
        fn_constructor_args=(spec.model_dump(mode="json"), list(statistics), rows, order, start),
        batch_size=per_block,
        compute=ActorPoolStrategy(size=1),
        num_cpus=spec.resources.reader_cpus,
    )
    dataset.context.execution_options.preserve_order = True
    dataset.context.target_max_block_size = BLOCK_BYTES
    dataset.context.enable_progress_bars = False
    yield from dataset.iter_batches(batch_size=spec.micro_batch, batch_format="numpy", prefetch_batches=2)
