"""Feed by Ray Data: a reader actor fills the object store ahead of its rank.

Each rank owns an ordered pipeline over its own sequence: positions -> samples -> windows. Ray Data sees
numbers of blocks only, so what it does never changes which window comes when. The actor reads ahead by itself, as the
direct feed does, and lives on the node of its rank as long as there is room.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from typing import Any, cast

import numpy as np
import ray
import ray.data
from ray.data import ActorPoolStrategy, ExecutionResources

from sfm.feed.direct import direct_feed, window_bytes
from sfm.feed.order import RankOrder
from sfm.feed.source import Columns, SampleSource
from sfm.spec import JobSpec
from sfm.survey import heap

BLOCK_BYTES = 64 * 2**20  # Ray Data's cost is per block; smaller blocks starve it, larger ones come late
ITERATING = "iter_threaded"  # name of the threads in which Ray Data iterates over blocks


class _Reader:
    """Runs in an actor: turns the number of a block of positions into its windows."""

    def __init__(
        self,
        spec: dict[str, Any],
        statistics: Sequence[dict[str, Any]],
        rows: range,
        order: RankOrder,
        positions: range,
    ) -> None:
        heap.keep_pages()
        self.source = SampleSource(JobSpec.model_validate(spec), statistics, rows)
        self.order, self.positions = order, positions
        self.following = -1
        self.batches: Generator[Columns, None, None] | None = None

    def __call__(self, numbers: dict[str, np.ndarray]) -> Columns:
        (block,) = (int(number) for number in numbers["item"])
        if self.batches is None or block != self.following:  # the first, or those of a reader that died
            start, stop, size = self.positions[block], self.positions.stop, self.positions.step
            # Two blocks on their way beside the one in hand: more wait in the object store, which has its own budget.
            self.batches = direct_feed(self.source, self.order, start, stop, size, ahead=2)
        self.following = block + 1
        return next(self.batches)


def ray_feed(
    spec: JobSpec, statistics: Sequence[dict[str, Any]], rows: range, order: RankOrder, start: int, stop: int
) -> Generator[Columns, None, None]:
    """Micro-batches at positions `start` ... `stop` - 1 of a rank's sequence, in order. Runs inside the rank's worker."""
    micro = spec.micro_batch
    window = window_bytes(spec, rows)
    ahead = spec.resources.ahead_mib * 2**20
    # Whole micro-batches, so that none is put together from two blocks; a few blocks within what may lie ahead.
    size = micro * max(1, min(BLOCK_BYTES, ahead // 4) // (micro * window))
    positions = range(start, stop, size)
    if not positions:
        return
    # Numbers made here need no task to read them: a task would wait for a CPU that the job never asked for.
    numbers = ray.data.from_items(list(range(len(positions))), override_num_blocks=min(200, len(positions)))
    dataset = numbers.map_batches(
        _Reader,
        fn_constructor_args=(spec.model_dump(mode="json"), list(statistics), rows, order, positions),
        batch_size=1,
        compute=ActorPoolStrategy(size=1),
        num_cpus=spec.resources.reader_cpus,
        label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()},
        fallback_strategy=[{"label_selector": {}}],  # on another node rather than not at all
    )
    options = dataset.context.execution_options
    options.preserve_order = True
    options.resource_limits = ExecutionResources.for_limits(object_store_memory=max(ahead, 3 * size * window))
    dataset.context.target_max_block_size = max(BLOCK_BYTES, size * window)
    dataset.context.enable_progress_bars = False
    iterable = dataset.iter_batches(batch_size=micro, batch_format="numpy", prefetch_batches=2)
    batches = cast("Generator[Columns, None, None]", iter(iterable))
    others = set(threading.enumerate())
    threads: list[threading.Thread] = []
    try:
        first = next(batches)
        threads += [t for t in threading.enumerate() if t not in others and t.name == ITERATING]
        yield first
        yield from batches
    finally:
        batches.close()
        # Left alone, one that lets go of its blocks after Ray was shut down ends the whole process. They see within 0.1 s
        # that nobody asks any more; not where Ray Data itself failed, so none is waited for without end.
        for thread in threads:
            thread.join(timeout=5)
