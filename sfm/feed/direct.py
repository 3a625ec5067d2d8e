"""Feed without Ray: threads of the worker read ahead. The plain alternative, and the oracle of the other."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

from sfm.feed.order import RankOrder
from sfm.feed.source import Columns, SampleSource
from sfm.spec import JobSpec
from sfm.survey.scaling import storage_type


def window_bytes(spec: JobSpec, rows: range) -> int:
    """Bytes of one window's slab of patch `rows`."""
    return storage_type(spec.window.dtype).itemsize * math.prod(spec.window.shape) * len(rows) // spec.grid[0]


def batches_ahead(spec: JobSpec, rows: range, batch: int) -> int:
    """How many batches of `batch` windows are read in advance: as many as `resources.ahead_mib` holds, at least two."""
    return max(2, spec.resources.ahead_mib * 2**20 // (batch * window_bytes(spec, rows)))


def direct_feed(
    source: SampleSource, order: RankOrder, start: int, stop: int, batch: int, ahead: int
) -> Generator[Columns, None, None]:
    """Batches of `batch` windows at positions `start` ... `stop` - 1 of a rank's sequence, in order; the last may be
    smaller.

    Args:
        ahead: batches that are kept ready, or on their way, beyond the one handed out.
    """

    def read(at: int) -> Columns:
        return source.training([order.sample(position) for position in range(at, min(at + batch, stop))])

    # A few at a time: each of them has all its requests in flight, and the first is wanted first.
    with ThreadPoolExecutor(max_workers=min(ahead, 4), thread_name_prefix="feed") as pool:
        places = iter(range(start, stop, batch))
        pending = deque(pool.submit(read, at) for at in itertools.islice(places, ahead))
        try:
            while pending:
                columns = pending.popleft().result()
                following = next(places, None)
                if following is not None:
                    pending.append(pool.submit(read, following))
                yield columns
        finally:
            for future in pending:
                future.cancel()
