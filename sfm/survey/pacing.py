"""How many requests are in flight, and when one is made again. Pure: clocks and random numbers are given."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Exponential back-off with full jitter (Brooker 2015, AWS Architecture Blog)."""

    first: float = 0.1
    """Most seconds before the second attempt."""
    most: float = 5.0
    """Most seconds before any."""
    attempts: int = 8
    deadline: float = 120.0
    """Seconds after which no further attempt begins."""

    def pause(self, attempt: int, elapsed: float, draw: float) -> float | None:
        """Seconds to wait after failure number `attempt` (from 1), None to give up.

        Args:
            elapsed: seconds since the first attempt began.
            draw: uniform in [0, 1).
        """
        if attempt >= self.attempts or elapsed >= self.deadline:
            return None
        return draw * min(self.most, self.first * 2 ** (attempt - 1))


class Concurrency:
    """How many requests may be in flight: raised while that brings more bytes a second, halved when the store objects.

    Looks at intervals: at least as many requests as are allowed, and `interval` seconds. One in which most requests had
    none waiting behind them says nothing of more, and changes nothing. A store objects to more than one request, and to
    more than 5 % of them: every large store refuses a few now and then, and to halve for each would end with a handful.
    """

    def __init__(self, start: int = 16, least: int = 4, most: int = 128, interval: float = 0.25) -> None:
        self.limit = max(least, min(start, most))
        self.least, self.most, self.interval = least, most, interval
        self._best = 0.0
        self._began: float | None = None
        self._bytes = self._requests = 0
        self._throttled = self._full = 0

    def rest(self) -> None:
        """None is in flight: the time until the next one is nobody's."""
        self._began, self._bytes, self._requests = None, 0, 0
        self._throttled = self._full = 0

    def done(self, now: float, size: int, *, full: bool, throttled: bool = False, took: float = 0.0) -> int:
        """Take note of a request that ended at `now` seconds with `size` bytes; returns the limit from now on.

        Args:
            took: seconds since it began.
            full: whether as many as allowed were in flight, and more waited.
            throttled: whether the store asked for fewer (429, 503).
        """
        if self._began is None:
            self._began = now - took
        self._bytes += size
        self._requests += 1
        self._full += full
        self._throttled += throttled
        elapsed = now - self._began
        if elapsed < self.interval or self._requests < self.limit:
            return self.limit
        rate = self._bytes / elapsed
        full = 2 * self._full > self._requests
        if self._throttled > max(1, 0.05 * self._requests):
            self._move(self.limit // 2)
            self._best = 0.0  # what was best before is not to be had now
        elif full and rate > 1.05 * self._best:
            self._best = rate
            self._move(self.limit + max(2, self.limit // 4))
        elif full and rate < 0.8 * self._best:
            self._best = rate
            self._move(self.limit - max(1, self.limit // 4))
        self._began, self._bytes, self._requests = now, 0, 0
        self._throttled = self._full = 0
        return self.limit

    def _move(self, limit: int) -> None:
        self.limit = max(self.least, min(limit, self.most))
