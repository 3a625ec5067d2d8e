"""What does Ray Data cost between the reader and the rank, and what do a slow and faulty store?

A survey of 512 x 512 x 512 float32 in Blosc chunks of 128 x 128 x 128 on an S3-protocol server on this machine
(`benchmarks/bucket.py`). A rank takes windows of 128 x 128 x 128 anywhere in it, as fast as they come, makes tensors of
them, and counts from its first micro-batch to its last. Nothing is kept in caches. One process computes without end
beside it, as a training step would. In turns, in every round after one that does not count, in which the object
store's memory is touched for the first time:

    direct       threads of the rank's own process read (feed: direct)
    ray          a reader actor reads, Ray Data brings the windows over (feed: ray)
    slow         as direct, but every request waits 50 ms, 0.5 % are answered 503 and 0.5 % are cut short half way

Before that, in a fresh process that has imported what it needs: the seconds from making a reader, which opens the
survey, to its first window in hand (`first_window_s`, median).

All must give the same windows, compared by a hash of each, in the same order, or there is no result.

    make bench-feed      last line: {"feed_of_direct": ..., "slow_of_direct": ...}; higher is better
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.bucket import Bucket
from benchmarks.read import BUCKET, Sizes, write_surveys
from sfm.feed.direct import batches_ahead, direct_feed
from sfm.feed.order import RankOrder
from sfm.feed.ray_data import ray_feed
from sfm.feed.source import Columns, SampleSource
from sfm.spec import JobSpec, parse_spec
from sfm.survey.heap import keep_pages
from sfm.survey.mdio import open_survey
from sfm.survey.statistics import estimate
from sfm.train.step import MicroBatch

CALM = {"latency": 0.0, "fail": 0.0, "cut": 0.0}
SLOW = {"latency": 0.05, "fail": 0.005, "cut": 0.005}


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process multiplies matrices meanwhile."""
    process = mp.get_context("spawn").Process(target=_multiply, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _multiply() -> None:
    torch.set_num_threads(1)
    a = torch.randn(512, 512)
    while True:
        a = torch.tanh(a @ a)


def job(url: str, options: argparse.Namespace) -> JobSpec:
    """A job over the survey: nothing is kept, and everything is read anew."""
    return parse_spec(
        {
            "surveys": [{"url": url, "storage": {"anonymous": True}}],
            "window": {"shape": [options.window] * 3, "held_out": 0},
            "model": {"preset": "tiny", "patch": [options.window // 8] * 3},
            "batch": {"size": 2},
            "resources": {"cache_mib": 0, "ahead_mib": options.ahead},
        }
    )


def consume(batches: Generator[Columns, None, None], count: int) -> tuple[float, list[str]]:
    """Windows a second from the first micro-batch on, and a hash of each. Hashing is not counted."""
    first = next(batches)
    hashes, aside, taken = _hashes(first), 0.0, 0
    began = time.perf_counter()
    for columns in batches:
        batch = MicroBatch.of(columns)
        taken += len(batch.voxels)
        at = time.perf_counter()
        hashes += _hashes(columns)
        aside += time.perf_counter() - at
    seconds = time.perf_counter() - began - aside
    if taken + len(first["voxels"]) != count:
        raise SystemExit(f"{taken} windows came after the first micro-batch, of {count}")
    return taken / seconds, hashes


def _hashes(columns: Columns) -> list[str]:
    # Of a part: hashing all of a window takes longer than reading it, and would hide what is measured.
    return [hashlib.sha256(window[::8].tobytes()).hexdigest() for window in columns["voxels"]]


def first_window(spec: JobSpec, stats: list[dict[str, Any]]) -> float:
    """Seconds until a reader that is made now has its first window; in a process of its own."""
    with mp.get_context("spawn").Pool(1) as pool:
        return pool.apply(_first_window, (spec, stats))


def _first_window(spec: JobSpec, stats: list[dict[str, Any]]) -> float:
    began = time.perf_counter()
    source = SampleSource(spec, stats)
    source.training([0])
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512, help="voxels of the survey along each axis")
    parser.add_argument("--window", type=int, default=128, help="voxels of a window along each axis")
    parser.add_argument("--windows", type=int, default=160, help="windows in each turn")
    parser.add_argument("--ahead", type=int, default=512, help="windows read ahead (MiB)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-feed-") as folder:
        write_surveys(Path(folder), Sizes(options.size, min(128, options.size // 4), options.window))
        with Bucket(folder) as bucket:
            os.environ.update(bucket.environment)
            result = run(options, bucket)
    print(json.dumps(result))


def run(options: argparse.Namespace, bucket: Bucket) -> dict[str, Any]:
    """All rounds."""
    import ray

    # Ray makes its workers nice. In a job the rank and what it computes are such workers, too: here all are equal.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its name
    keep_pages()  # as reader actors do; otherwise `direct` would be measured for what it may not do where a model trains
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    spec = job(f"s3://{BUCKET}/blosc.mdio", options)
    stats = [estimate(open_survey(spec.surveys[0].url, spec.surveys[0].storage)).to_json()]
    rows, order, count = range(spec.grid[0]), RankOrder.of(spec, 0), options.windows

    def direct() -> tuple[float, list[str]]:
        source = SampleSource(spec, stats, rows)
        ahead = batches_ahead(spec, rows, spec.micro_batch)
        try:
            return consume(direct_feed(source, order, 0, count, spec.micro_batch, ahead), count)
        finally:
            source.close()

    def by_ray() -> tuple[float, list[str]]:
        return consume(ray_feed(spec, stats, rows, order, 0, count), count)

    def slow() -> tuple[float, list[str]]:
        bucket.set(**SLOW)
        try:
            return direct()
        finally:
            bucket.set(**CALM)

    turns = {"direct": direct, "ray": by_ray, "slow": slow}
    rates: dict[str, list[float]] = {name: [] for name in turns}
    expected: list[str] = []
    megabytes = 4 * options.window**3 / 1e6
    firsts = [first_window(spec, stats) for _ in range(options.rounds)]
    with busy_core():
        for number in range(-1, options.rounds):
            for name, turn in turns.items():
                rate, hashes = turn()
                expected = expected or hashes
                if hashes != expected:
                    raise SystemExit(f"{name}: other windows than the first reader's, or in another order")
                if number >= 0:
                    rates[name].append(rate)
                print(f"round {number + 1}  {name:7} {rate:6.1f} windows/s  {rate * megabytes:7.0f} MB/s", flush=True)
    ray.shutdown()
    faults = {name: amount for name, amount in bucket.stats().items() if name != "paths"}

    def against_direct(name: str) -> float:
        return round(statistics.median(a / b for a, b in zip(rates[name], rates["direct"], strict=True)), 3)

    return {
        "feed_of_direct": against_direct("ray"),
        "slow_of_direct": against_direct("slow"),
        **{f"{name}_mb_s": round(statistics.median(found) * megabytes, 1) for name, found in rates.items()},
        "first_window_s": round(statistics.median(firsts), 3),
        "rounds": options.rounds,
        "windows": options.windows,
        "server": faults,
        "versions": {name: version(name) for name in ("ray", "obstore", "zarr", "numcodecs")},
    }


if __name__ == "__main__":
    main()
