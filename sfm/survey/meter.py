"""What reading costs: counters of one process, and the difference between two moments."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class Reading:
    """Sums since a reader began, or between two moments, over all threads."""

    requests: float = 0
    """Requests made of stores, repeated ones included."""
    retries: float = 0
    """Requests made again after a failure."""
    bytes_fetched: float = 0
    """Bytes that stores sent."""
    bytes_decoded: float = 0
    """Bytes of chunks after decoding."""
    cache_hits: float = 0
    """Chunks that were in memory, or on their way there."""
    cache_misses: float = 0
    """Chunks that had to be fetched or taken from the disk cache."""
    disk_hits: float = 0
    """Objects that lay in the disk cache."""
    absent_chunks: float = 0
    """Chunks that the store does not hold: by Zarr's rules they are made of the fill value."""
    fetch_seconds: float = 0.0
    """Seconds from a request to the end of its body."""
    decode_seconds: float = 0.0
    """Processor seconds of decoding, scaling and placing."""
    queued: float = 0
    """Requests that waited for their turn, when they were made."""

    def minus(self, earlier: Reading) -> Reading:
        """What came after `earlier`."""
        return Reading(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(Reading)})

    def plus(self, other: Reading) -> Reading:
        """Both together."""
        return Reading(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Reading)})

    def to_json(self) -> dict[str, float]:
        """The fields as plain numbers."""
        return asdict(self)

    def to_row(self) -> list[float]:
        """The fields in their order, to travel in a column of numbers."""
        return [float(value) for value in asdict(self).values()]

    @classmethod
    def of_rows(cls, rows: Any) -> Reading:
        """The sum of [n, fields] rows of :meth:`to_row`."""
        return cls(*(float(value) for value in rows.sum(axis=0)))


class Meter:
    """A :class:`Reading` that threads add to."""

    def __init__(self) -> None:
        self._reading = Reading()
        self._lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        """Add to the named fields."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._reading, name, getattr(self._reading, name) + amount)

    def now(self) -> Reading:
        """The sums so far."""
        with self._lock:
            return Reading(**asdict(self._reading))
