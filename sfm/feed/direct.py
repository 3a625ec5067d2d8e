"""Feed without Ray: threads of the worker read ahead. The plain alternative, and the oracle of the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

from sfm.feed.order import RankOrder
from sfm.feed.source import Columns, SampleSource


def direct_feed(
    source: SampleSource, order: RankOrder, start: int, stop: int, micro: int, ahead: int = 2
) -> Generator[Columns, None, None]:
    """Micro-batches of `micro` windows at positions `start` ... `stop` - 1 of a rank's sequence, in order.

    Args:
        ahead: micro-batches read in advance.
    """
    with ThreadPoolExecutor(max_workers=ahead, thread_name_prefix="feed") as pool:
        pending = deque(
            pool.submit(source.training, _indices(order, at, micro))
            for at in range(start, min(stop, start + ahead * micro), micro)
        )
        for at in range(start, stop, micro):
            batch = pending.popleft().result()
            following = at + ahead * micro
            if following < stop:
                pending.append(pool.submit(source.training, _indices(order, following, micro)))
            yield batch


def _indices(order: RankOrder, at: int, micro: int) -> list[int]:
    return [order.sample(position) for position in range(at, at + micro)]
