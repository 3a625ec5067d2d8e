"""Reading windows of a survey: whole chunks, kept for a while, scaled, with NaN where there is no data."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from sfm.survey.mdio import Survey
from sfm.survey.store import SurveyError

if TYPE_CHECKING:
    from sfm.survey.statistics import Statistics

Index = tuple[int, int, int]
Region = tuple[slice, slice, slice]

DEAD_SAMPLES = 16  # zeros in a row that a live trace does not hold


def chunk_region(survey: Survey, index: Index) -> Region:
    """The part of the survey that chunk `index` covers."""
    i, x, t = (
        slice(number * chunk, min((number + 1) * chunk, size))
        for number, chunk, size in zip(index, survey.chunks, survey.shape, strict=True)
    )
    return i, x, t


def read_chunk(survey: Survey, index: Index) -> np.ndarray:
    """Amplitudes of one chunk as float32 (whatever they are stored as), cut at the edge of the survey.

    A trace that is exactly zero all through the chunk has no data there (a dead or muted trace that SEG-Y
    carries along) and becomes NaN, provided the chunk is deep enough for that to be no accident.

    Raises:
        SurveyError: it cannot be fetched or decoded.
    """
    try:
        stored = survey.array[chunk_region(survey, index)]
    except Exception as error:
        raise SurveyError(
            f"{survey.url}: chunk {index} cannot be read: {type(error).__name__}: {error}; "
            "ingest the survey again if the chunk is damaged"
        ) from error
    with np.errstate(over="ignore"):  # beyond float32 becomes infinite, thus no data
        values = np.array(stored, np.float32, order="C", copy=None)
    if values.shape[2] >= DEAD_SAMPLES:
        values[~values.any(axis=2)] = np.nan
    return values


def normalise(values: np.ndarray, live: np.ndarray, statistics: Statistics) -> np.ndarray:
    """Clip and scale amplitudes; NaN where a trace is dead or a value is not finite.

    Args:
        values: [I, X, T] float32, as stored.
        live: [I, X] bool.

    Returns:
        [I, X, T] float32 in standard deviations from the mean of the survey.
    """
    finite = np.isfinite(values)  # before clipping, which would turn infinity into an amplitude
    out = np.clip(values, statistics.low, statistics.high)
    out -= statistics.mean
    out /= statistics.std
    if not finite.all():
        out[~finite] = np.nan
    if not live.all():
        out[~live] = np.nan
    return out


class WindowReader:
    """Reads any window of a survey. Threads may share one reader; processes each make their own.

    Random windows smaller than a chunk meet the same chunks again and again, so decoded, scaled chunks
    (4 bytes per voxel) are kept, the least recently used ones dropped beyond `cache_bytes`.

    Attributes:
        bytes_read: decoded bytes fetched from the store so far, 4 per voxel.
        cache_hits: chunks that a window found in memory, or already on their way.
        cache_misses: chunks that had to be fetched.
    """

    def __init__(
        self, survey: Survey, statistics: Statistics, cache_bytes: int = 512 * 2**20, threads: int = 8
    ) -> None:
        self.survey = survey
        self.statistics = statistics
        self.cache_bytes = cache_bytes
        self.bytes_read = 0
        self.cache_hits = 0
        self.cache_misses = 0
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="chunks")
        self._lock = threading.Lock()  # guards everything below, and the counters
        self._kept: OrderedDict[Index, np.ndarray] = OrderedDict()
        self._kept_bytes = 0
        self._coming: dict[Index, Future[np.ndarray]] = {}

    def read(self, origin: Index, shape: Index) -> np.ndarray:
        """Normalised amplitudes of a window, float32, C-contiguous, NaN where there is no data.

        Args:
            origin: first voxel (inline, crossline, sample), an index from 0.
            shape: voxels along each axis.

        Raises:
            SurveyError: the window leaves the survey, or a chunk cannot be read or decoded.
        """
        self._check(origin, shape)
        window = np.empty(shape, np.float32)
        stop = [o + n for o, n in zip(origin, shape, strict=True)]
        ranges = [range(o // c, (e - 1) // c + 1) for o, e, c in zip(origin, stop, self.survey.chunks, strict=True)]
        indices: list[Index] = [(i, x, t) for i, x, t in itertools.product(*ranges)]
        # All are asked for before the first is waited for, so that the missing ones arrive side by side.
        pending = [self._ask(index) for index in indices]
        for index, chunk in zip(indices, pending, strict=True):
            values = chunk if isinstance(chunk, np.ndarray) else chunk.result()
            inside, target = [], []
            for o, e, number, size in zip(origin, stop, index, self.survey.chunks, strict=True):
                first, last = max(o, number * size), min(e, (number + 1) * size)
                inside.append(slice(first - number * size, last - number * size))
                target.append(slice(first - o, last - o))
            window[tuple(target)] = values[tuple(inside)]
        return window

    def close(self) -> None:
        """Forget the chunks and end the threads."""
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            self._kept.clear()
            self._kept_bytes = 0

    def _ask(self, index: Index) -> np.ndarray | Future[np.ndarray]:
        with self._lock:
            if index in self._kept:
                self.cache_hits += 1
                self._kept.move_to_end(index)
                return self._kept[index]
            if index in self._coming:
                self.cache_hits += 1
                return self._coming[index]
            self.cache_misses += 1
            future = self._coming[index] = self._threads.submit(self._fetch, index)
            return future

    def _fetch(self, index: Index) -> np.ndarray:
        try:
            values = read_chunk(self.survey, index)
            rows, lines, _ = chunk_region(self.survey, index)
            chunk = normalise(values, self.survey.trace_mask[rows, lines], self.statistics)
        except BaseException:
            with self._lock:  # the next window that needs it tries again
                del self._coming[index]
            raise
        with self._lock:
            del self._coming[index]
            self.bytes_read += chunk.nbytes
            if chunk.nbytes <= self.cache_bytes:
                self._kept[index] = chunk
                self._kept_bytes += chunk.nbytes
            while self._kept_bytes > self.cache_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._kept_bytes -= dropped.nbytes
        return chunk

    def _check(self, origin: Index, shape: Index) -> None:
        for axis, first, count, size in zip(self.survey.axes, origin, shape, self.survey.shape, strict=True):
            if first < 0 or count < 1 or first + count > size:
                raise SurveyError(
                    f"{self.survey.url}: a window of {count} from {first} along {axis.name} leaves the survey, "
                    f"which has {size} there"
                )
