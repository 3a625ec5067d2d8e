"""How many requests are in flight, and when they are made again: pure, so tried by the thousand."""

from __future__ import annotations

import random

import pytest

from sfm.survey.pacing import Backoff, Concurrency


def run(
    pace: Concurrency, seconds: float, capacity: float, latency: float, size: int = 2**20, refused: float = 0.0
) -> None:
    """A store that gives `capacity` bytes a second in all, and nobody more than one object in `latency` seconds. It
    refuses a share of the requests."""
    now, rng = 1000.0, random.Random(0)
    while now < 1000 + seconds:
        # All in flight come together: what they share decides how long that takes.
        now += max(latency, pace.limit * size / capacity)
        for _ in range(pace.limit):
            throttled = rng.random() < refused
            pace.done(now, 0 if throttled else size, full=True, throttled=throttled)


def test_a_few_refusals_change_little_and_many_much() -> None:
    calm, busy = Concurrency(most=256), Concurrency(most=256)
    run(calm, 60, capacity=1e9, latency=0.05, refused=0.01)
    run(busy, 60, capacity=1e9, latency=0.05, refused=0.3)
    assert 40 <= calm.limit <= 100
    assert busy.limit <= 8


def test_rises_until_more_brings_nothing() -> None:
    pace = Concurrency(start=4, most=256)
    run(pace, 60, capacity=1e9, latency=0.05)  # 50 objects of 1 MiB in 50 ms
    assert 40 <= pace.limit <= 100


def test_pauses_are_not_held_against_the_store() -> None:
    """Bursts, as of a job whose computing takes longer than reading, from a store that could give more."""
    for seed in range(200):
        rng = random.Random(seed)
        pace, now, lowest = Concurrency(), 0.0, 128
        for _ in range(40):
            left = rng.randint(40, 400)
            while left > 0:
                batch, took = min(left, pace.limit), 0.05 * rng.uniform(1, 1.1)
                left -= batch
                now += took
                for _ in range(batch):
                    pace.done(now, 2**20, full=left > 0, took=took)
                lowest = min(lowest, pace.limit)
            pace.rest()
            now += rng.uniform(0.1, 2)
        assert lowest >= 16
        assert pace.limit > 16


def test_stays_low_where_one_stream_fills_the_line() -> None:
    pace = Concurrency(start=4, most=256)
    run(pace, 60, capacity=5e7, latency=0.001)
    assert pace.limit <= 8


def test_halves_when_the_store_objects_and_comes_back() -> None:
    pace = Concurrency(start=64, most=64, interval=0.1)
    for _ in range(64):
        pace.done(0.0, 0, full=True, throttled=True)
    assert pace.done(0.2, 0, full=True, throttled=True) == 32
    run(pace, 10, capacity=1e9, latency=0.05)
    assert pace.limit > 40


def test_what_is_not_used_up_changes_nothing() -> None:
    pace = Concurrency(start=16)
    for n in range(1000):
        assert pace.done(n * 0.01, 2**20, full=False) == 16


def test_never_leaves_its_bounds() -> None:
    for seed in range(1000):
        rng = random.Random(seed)
        least = rng.randint(1, 8)
        most = rng.randint(least, 64)
        pace, now = Concurrency(rng.randint(1, 100), least, most, interval=0.01), 0.0
        for _ in range(300):
            now += rng.random() * 0.01
            limit = pace.done(now, rng.randint(0, 10**6), full=rng.random() < 0.9, throttled=rng.random() < 0.1)
            assert least <= limit <= most


def test_pauses_grow_within_their_bounds_and_end() -> None:
    backoff = Backoff(first=0.1, most=2.0, attempts=6, deadline=30)
    longest = [backoff.pause(attempt, 0.0, 0.999999) for attempt in range(1, 6)]
    assert longest == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6], rel=1e-4)
    assert backoff.pause(6, 0.0, 0.5) is None
    assert backoff.pause(1, 31.0, 0.5) is None
    assert Backoff(attempts=50).pause(40, 0.0, 0.999999) == pytest.approx(5.0, rel=1e-4)
    assert backoff.pause(3, 0.0, 0.0) == 0.0  # full jitter
