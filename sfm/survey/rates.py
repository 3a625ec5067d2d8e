"""What this machine reads from a store, by how many requests are in flight; and what limits it."""

from __future__ import annotations

import contextlib
import io
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sfm.survey.clients import SurveyError
from sfm.survey.copies import chunks_met
from sfm.survey.layout import Index, Layout
from sfm.survey.mdio import Survey
from sfm.survey.reader import WindowReader
from sfm.survey.transfers import Transfers

GAIN = 1.05
"""More requests in flight must bring this much more, or they bring nothing."""
BUSY = 0.85
"""Share of the CPUs from which on they are what limits."""
SMALL = 2**18
"""Bytes a request under which its own cost is what counts."""
_PATIENCE = 10
"""Times the seconds asked for that a slow store is given to bring anything."""


@dataclass(frozen=True)
class Point:
    """What reading random windows brought with so many requests in flight."""

    in_flight: int
    seconds: float
    """Wall time."""
    requests: int
    retries: int
    bytes_fetched: int
    bytes_decoded: int
    windows: int
    fetch_seconds: float
    """Seconds from requests to the ends of their bodies, added up."""
    decode_seconds: float
    """Seconds of decoding, scaling and placing, added up over threads."""
    cpu_seconds: float
    """CPU time of this process."""
    cpus: int
    """CPUs that this process may use."""
    others_share: float
    """Share of the machine's CPUs that other processes used (0 to 1); 0 where that is not known."""
    p50: float
    """Seconds within which half of the windows were there; NaN without windows."""
    p95: float

    @property
    def rate(self) -> float:
        """Bytes a second from the store."""
        return self.bytes_fetched / self.seconds

    @property
    def decoded_rate(self) -> float:
        """Decoded bytes a second: what trials are compared by. What was fetched may wait for decoding yet."""
        return self.bytes_decoded / self.seconds

    @property
    def cpu_share(self) -> float:
        """Share of its CPUs that this process used (0 to 1)."""
        return self.cpu_seconds / self.seconds / self.cpus

    @property
    def decode_rate(self) -> float:
        """Bytes that one thread decodes in a second."""
        return self.bytes_decoded / self.decode_seconds if self.decode_seconds else math.nan

    def to_json(self) -> dict[str, Any]:
        """The fields and rates as plain numbers, None for NaN."""
        names = ("rate", "decoded_rate", "cpu_share", "decode_rate")
        found = {**asdict(self), **{name: getattr(self, name) for name in names}}
        return {name: None if value != value else value for name, value in found.items()}


def saturating(points: Sequence[Point]) -> Point:
    """The point with the fewest requests in flight that brings the best rate, but for five percent."""
    best = max(point.decoded_rate for point in points)
    return min((point for point in points if point.decoded_rate * GAIN >= best), key=lambda point: point.in_flight)


def still_rising(points: Sequence[Point]) -> bool:
    """Whether the last point brought more than all before it: nothing is known of the next one."""
    return len(points) == 1 or points[-1].decoded_rate > GAIN * max(point.decoded_rate for point in points[:-1])


def enough(points: Sequence[Point]) -> bool:
    """Whether more requests in flight are not worth a trial: the last two steps brought nothing. One may be chance."""
    if len(points) < 3:
        return False
    best = max(point.decoded_rate for point in points[:-2])
    return max(point.decoded_rate for point in points[-2:]) <= GAIN * best


def verdict(points: Sequence[Point]) -> list[str]:
    """Which number of requests saturates, and what limits there, in sentences."""
    point = saturating(points)
    core = max((p.decode_rate for p in points if p.decode_seconds), default=math.nan)
    brings = f"{_mb(point.decoded_rate)} MB/s decoded, {_mb(point.rate)} MB/s from the store"
    said = []
    if len(points) == 1:
        said.append(f"{point.in_flight} in flight: {brings}; how many saturate takes more than one trial: try --most")
    elif still_rising(points):
        said.append(f"{point.in_flight} in flight are not enough: more still bring more ({brings}); try --most")
    else:
        said.append(f"{point.in_flight} in flight saturate: {brings}; more bring no more")
        said.append(_limit(point, core))
    if not math.isnan(core):
        said.append(f"one core decodes {core / 1e9:.2g} GB/s of what this survey holds, scaling included")
    return said


def _limit(point: Point, core: float) -> str:
    """What limits at `point`, where one core decodes `core` bytes a second."""
    decoding = point.bytes_decoded / core if point.bytes_decoded else 0.0  # seconds, were nothing else in its way
    used = f"{point.cpu_share:.0%} of {point.cpus} CPUs in use here"
    if point.cpu_share >= BUSY:
        share = min(decoding / point.cpu_seconds, 1.0)
        if share >= 0.5:
            return f"decoding limits: it takes {share:.0%} of the CPU time, {used}"
        return f"this machine's CPUs limit ({used}): decoding takes {share:.0%} of that, the rest goes into transfer"
    if point.cpu_share + point.others_share >= BUSY:
        return (
            f"this machine's CPUs limit: {used}, and other processes, such as a server on this machine, "
            f"use {point.others_share:.0%}"
        )
    each = point.bytes_fetched / max(point.requests, 1)
    if each < SMALL:
        return f"the number of requests limits, of {each / 1024:,.0f} KiB each, or the store: {used}"
    return f"the store, or the way to it, limits: {used}"


class Bench:
    """Reads random windows of a survey with a given number of requests in flight.

    Args:
        window: voxels along each axis; cut down to the survey.
        memory: bytes that chunks on their way may take.
    """

    def __init__(self, survey: Survey, window: Index, memory: int = 2 * 2**30) -> None:
        i, x, t = (min(n, size) for n, size in zip(window, survey.shape, strict=True))
        self.survey, self.window, self.memory = survey, (i, x, t), memory
        self.cpus = _cpus()
        self._met = math.prod(
            chunks_met(n, w, c) for n, w, c in zip(survey.shape, self.window, survey.chunks, strict=True)
        )
        parts = 1 if survey.array.shards is None else math.ceil(self._met)  # neighbours in a shard come together
        self._request_bytes = parts * survey.layout.memory
        self._live = np.argwhere(survey.trace_mask)
        if not len(self._live):
            raise SurveyError(f"{survey.url}: no trace is live; there is nothing to read")

    def levels(self, most: int) -> list[int]:
        """1, 2, 4 ... up to `most`, as far as memory for the chunks goes; 1 in any case."""
        fits = max(1, self.memory // self._request_bytes)
        return [n for n in (2**k for k in range(most.bit_length())) if n <= min(most, fits)]

    def measure(self, in_flight: int, seconds: float = 3.0, seed: int = 0) -> Point:
        """Read windows for about `seconds`, after a start that is not counted, and longer while nothing has come.

        Raises:
            SurveyError: a window cannot be read, or nothing came in ten times the time.
        """
        # A layout of its own: what another trial has learnt about the chunks saves requests.
        survey = replace(self.survey, layout=Layout(self.survey.array, self.survey.url))
        # Chunks that wait for decoding are not to pile up: what is fetched would not be what comes through.
        memory = min(self.memory, (in_flight + in_flight // 2 + 2 * self.cpus) * self._request_bytes)
        transfers = Transfers(memory, self.cpus, in_flight, fixed=True)
        reader = WindowReader(survey, transfers=transfers, keep=False)
        threads = max(2, math.ceil(2 * in_flight / self._met))  # some decode or start while others fetch
        took: list[float] = []
        stop = threading.Event()

        def work(number: int) -> None:
            rng = np.random.default_rng([seed, in_flight, number])
            room = np.empty(self.window, np.float32)
            while not stop.is_set():
                began = time.perf_counter()
                reader.read(self._origin(rng), self.window, out=room)
                took.append(time.perf_counter() - began)

        with contextlib.closing(transfers), ThreadPoolExecutor(threads, thread_name_prefix="bench") as pool:
            jobs = [pool.submit(work, number) for number in range(threads)]
            try:
                self._wait(
                    jobs, lambda: bool(took) and transfers.meter.now().requests >= 2 * in_flight, seconds / 10, seconds
                )
                before, windows, start = transfers.meter.now(), len(took), _Clock()
                least = before.requests + in_flight
                self._wait(jobs, lambda: transfers.meter.now().requests >= least, seconds, seconds)
                read, spent, took = transfers.meter.now().minus(before), start.spent(), took[windows:]
            finally:
                stop.set()
        if not read.requests:
            raise SurveyError(
                f"{survey.url}: nothing came within {_PATIENCE * seconds:g} seconds; check the network, or try a "
                "smaller --window"
            )
        wall, cpu, others = spent
        return Point(
            in_flight=in_flight,
            seconds=wall,
            requests=int(read.requests),
            retries=int(read.retries),
            bytes_fetched=int(read.bytes_fetched),
            bytes_decoded=int(read.bytes_decoded),
            windows=len(took),
            fetch_seconds=read.fetch_seconds,
            decode_seconds=read.decode_seconds,
            cpu_seconds=cpu,
            cpus=self.cpus,
            others_share=others,
            p50=float(np.percentile(took, 50)) if took else math.nan,
            p95=float(np.percentile(took, 95)) if took else math.nan,
        )

    def sweep(self, most: int, seconds: float = 3.0, progress: Callable[[int, int], None] | None = None) -> list[Point]:
        """Measure at 1, 2, 4 ... requests in flight, until more bring no more.

        Args:
            progress: called with (levels done, levels in all).

        Raises:
            SurveyError: as :meth:`measure` does.
        """
        points: list[Point] = []
        levels = self.levels(most)
        for done, in_flight in enumerate(levels):
            if progress is not None:
                progress(done, len(levels))
            points.append(self.measure(in_flight, seconds))
            if enough(points):
                break
        return points

    def _origin(self, rng: np.random.Generator) -> Index:
        """Of a window around a live trace, as far as the edges of the survey let it."""
        trace = self._live[rng.integers(len(self._live))]
        room = [n - w for n, w in zip(self.survey.shape, self.window, strict=True)]
        i, x = (int(np.clip(at - w // 2, 0, r)) for at, w, r in zip(trace, self.window[:2], room[:2], strict=True))
        return i, x, int(rng.integers(room[2] + 1))

    def _wait(self, jobs: Sequence[Any], ready: Callable[[], bool], least: float, seconds: float) -> None:
        """At least so long, and until `ready`; at most for ten times `seconds`. Raises what ended a job."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < _PATIENCE * seconds:
            for job in jobs:
                if job.done():
                    job.result()
            if waited >= least and ready():
                return
            time.sleep(0.01)


class _Clock:
    """Wall time, CPU time of this process, and of the others on this machine, from when it was made."""

    def __init__(self) -> None:
        self._began, self._cpu, self._machine = time.perf_counter(), time.process_time(), _machine_times()

    def spent(self) -> tuple[float, float, float]:
        """Seconds; seconds; share of the machine's CPUs."""
        wall, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        now = _machine_times()
        if now is None or self._machine is None:
            return wall, cpu, 0.0
        busy = now - self._machine
        return wall, cpu, max(0.0, (busy - cpu) / wall / (os.cpu_count() or 1))


def _machine_times() -> float | None:
    """CPU seconds that all processes of this machine have used; None where no file tells."""
    try:
        fields = [int(v) for v in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _waiting, interrupts, soft, _stolen = fields
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def table(points: Sequence[Point]) -> list[str]:
    """The points as lines for a terminal."""
    lines = [
        f"{'in flight':>9} {'requests/s':>10} {'MB/s from store':>15} {'MB/s decoded':>12} {'CPUs':>5} "
        f"{'window p50':>10} {'p95':>8}"
    ]
    for p in points:
        lines.append(
            f"{p.in_flight:>9} {p.requests / p.seconds:>10.1f} {_mb(p.rate):>15} {_mb(p.decoded_rate):>12} "
            f"{p.cpu_share:>5.0%} {p.p50:>8.3f} s {p.p95:>6.3f} s"
        )
    return lines


def plot_png(points: Sequence[Point], title: str) -> bytes:
    """A PNG of throughput against requests in flight, with the point that saturates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained", dpi=110)
    axes = figure.subplots()
    across = [p.in_flight for p in points]
    axes.plot(across, [p.decoded_rate / 1e6 for p in points], "s--", color="#7a8ca3", label="decoded")
    axes.plot(across, [p.rate / 1e6 for p in points], "o-", color="#0b5394", label="from the store")
    point = saturating(points)
    word = "still rising at" if still_rising(points) else "saturated by"
    axes.axvline(point.in_flight, color="#f2a900", linewidth=1.2, zorder=0)
    left = across.index(point.in_flight) < len(across) / 2
    axes.annotate(
        f"{word} {point.in_flight} in flight\n{_mb(point.decoded_rate)} MB/s decoded",
        (point.in_flight, 0.03), xycoords=axes.get_xaxis_transform(), xytext=(6 if left else -6, 0),
        textcoords="offset points", fontsize=10, ha="left" if left else "right",
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(across, [str(n) for n in across])
    axes.set_ylim(0, 1.15 * max(max(p.rate, p.decoded_rate) for p in points) / 1e6)
    axes.margins(x=0.08)
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("MB/s")
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper left")
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _mb(rate: float) -> str:
    return f"{rate / 1e6:,.0f}" if rate >= 1e7 else f"{rate / 1e6:,.2g}"
