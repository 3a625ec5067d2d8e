"""Reading windows of a survey: many chunks at once, decoded straight into the window, scaled, NaN without data."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from sfm.survey.cache import ChunkCache
from sfm.survey.clients import SurveyError
from sfm.survey.codecs import Payload
from sfm.survey.layout import WHOLE, Fetch, Head, Index, Part, Want
from sfm.survey.mdio import Survey
from sfm.survey.objects import Bytes, DamagedError
from sfm.survey.scaling import DEAD_SAMPLES, WindowType, holds_data, no_data, scale_into, storage_type
from sfm.survey.store import explain
from sfm.survey.transfers import ClosedError, Transfers

if TYPE_CHECKING:
    from sfm.survey.statistics import Statistics

Slices = tuple[slice, slice, slice]
_LOOK_AGAIN = 10.0  # seconds between looks whether a survey with absent chunks is still there


class _Box(NamedTuple):
    """Where a window and a chunk meet."""

    inside: Slices
    """In the chunk."""
    target: Slices
    """In the window."""


class WindowReader:
    """Reads any window of a survey. Threads may share one reader; processes each make their own.

    A survey of which at least half fits into the cache is read in whole chunks, and decoded chunks are kept. Of
    another, windows take only the rows they need wherever the codec permits (Blosc and uncompressed chunks do):
    chunks would be dropped before they are met again.

    Args:
        statistics: what amplitudes are clipped to and scaled by; None leaves them as stored.
        transfers: threads and memory, shared by the readers of a process; default: its own.
        cache_bytes: decoded chunks kept in memory at most.
        kind: number format of windows; bfloat16 is given as its bits in uint16.
        pad: whether a window may leave the survey; there it holds no data.
        keep: whether decoded chunks are kept: always, never, or as above.
    """

    def __init__(
        self,
        survey: Survey,
        statistics: Statistics | None = None,
        transfers: Transfers | None = None,
        *,
        cache_bytes: int = 512 * 2**20,
        kind: WindowType = "float32",
        pad: bool = False,
        keep: bool | Literal["auto"] = "auto",
    ) -> None:
        self.survey, self.statistics, self.kind, self.pad = survey, statistics, kind, pad
        self.transfers = transfers or Transfers()
        layout = survey.layout
        if keep == "auto":
            chunks = math.prod(-(-n // c) for n, c in zip(survey.shape, survey.chunks, strict=True))
            keep = 2 * cache_bytes >= chunks * layout.codec.bytes
        self.cache = ChunkCache(cache_bytes) if keep else None
        self._looked = -math.inf
        self._owns_transfers = transfers is None

    def read(self, origin: Index, shape: Index, out: np.ndarray | None = None) -> np.ndarray:
        """Amplitudes of a window in standard deviations from the survey's mean, C-contiguous, NaN without data.

        No data: a trace that the mask calls dead, a value that is not finite, a place outside of the survey, and a
        trace of zeros all through the window, which SEG-Y carries along for a dead one, if that is no accident
        (`DEAD_SAMPLES`).

        Args:
            origin: first voxel (inline, crossline, sample), an index from 0.
            shape: voxels along each axis.
            out: [I, X, T] of the reader's number format, to write into; default: a new array.

        Raises:
            SurveyError: the window leaves the survey, a chunk cannot be fetched or decoded, or the process was forked.
        """
        self.transfers.check_process()
        inner = self._inside(origin, shape)
        window = np.empty(shape, storage_type(self.kind)) if out is None else out
        if window.shape != tuple(shape) or window.dtype != storage_type(self.kind):
            raise ValueError(
                f"out is {window.shape} of {window.dtype}, not {tuple(shape)} of {storage_type(self.kind)}"
            )
        if inner != tuple(shape):
            window[...] = no_data(self.kind)
        if 0 in inner:  # a slab wholly outside
            return window
        _Window(self, origin, window[tuple(slice(n) for n in inner)]).fill()
        return window

    def close(self) -> None:
        """Forget the chunks and end the threads, unless they are shared."""
        if self._owns_transfers:
            self.transfers.close()
        if self.cache is not None:
            self.cache.clear()

    def check_presence(self) -> None:
        """A chunk is absent: see that the survey is not.

        Raises:
            SurveyError: it is gone.
        """
        if time.monotonic() - self._looked < _LOOK_AGAIN:
            return
        key = self.survey.layout.metadata_key
        if self.transfers.fetch(self.survey.objects, key).result() is None:
            raise SurveyError(f"{self.survey.url}: the survey is no longer there; was it moved or removed meanwhile?")
        self._looked = time.monotonic()

    def _inside(self, origin: Index, shape: Index) -> Index:
        """The part of a window that lies in the survey, from its origin."""
        for axis, first, count, size in zip(self.survey.axes, origin, shape, self.survey.shape, strict=True):
            if first < 0 or count < 1 or (first + count > size and not self.pad):
                raise SurveyError(
                    f"{self.survey.url}: a window of {count} from {first} along {axis.name} leaves the survey, "
                    f"which has {size} there"
                )
        i, x, t = (
            max(0, min(count, size - first))
            for first, count, size in zip(origin, shape, self.survey.shape, strict=True)
        )
        return i, x, t


class _Window:
    """One window on its way."""

    def __init__(self, reader: WindowReader, origin: Index, window: np.ndarray) -> None:
        self.reader, self.window = reader, window
        self.survey, self.transfers, self.cache = reader.survey, reader.transfers, reader.cache
        self.layout, self.codec = reader.survey.layout, reader.survey.layout.codec
        rows, lines = (slice(o, o + n) for o, n in zip(origin[:2], window.shape[:2], strict=True))
        self.live = self.survey.trace_mask[rows, lines]
        self.boxes = dict(_boxes(origin, window.shape, self.survey.chunks))
        deep = sorted({box.target[2].start for box in self.boxes.values()})
        self.depth = {start: number for number, start in enumerate(deep)}
        self.holds_data = np.zeros((len(deep), *window.shape[:2]), bool)  # by chunks along the traces
        self.done: list[Future[None]] = []

    def fill(self) -> None:
        """Write all of the window.

        Raises:
            SurveyError: a chunk cannot be fetched or decoded.
        """
        left = list(self.boxes)
        while left:  # a chunk that another window was to bring and did not, perhaps for another chunk's sake
            left = self._place_all(left)
        dead = ~self.live
        if self.window.shape[2] >= DEAD_SAMPLES:
            dead |= ~self.holds_data.any(axis=0)
        if dead.any():
            self.window[dead] = no_data(self.reader.kind)

    def _place_all(self, indices: Sequence[Index]) -> list[Index]:
        """Place these chunks; returns those that other windows promised and did not bring."""
        wants: list[Want] = []
        promised: list[tuple[Index, Future[np.ndarray]]] = []
        asked: set[Index] = set()
        try:
            self._look_up(indices, wants, promised)
            self._learn_heads(wants)
            fetches, absent = self.layout.plan(wants, whole=self.whole)
            for want in absent:
                self._fill_in(want)
                asked.add(want.chunk)
            for fetch in fetches:
                asked.update(part.want.chunk for part in fetch.parts)
                self._send(fetch)
        except BaseException as error:
            self._abandon([want.chunk for want in wants if want.chunk not in asked], error)
            raise
        finally:
            for future in self.done:  # all of them: they write into the window
                future.exception()
        for future in self.done:
            future.result()
        broken = []
        for index, promise in promised:
            if promise.exception() is None:
                self._place(index, promise.result(), 0)
            else:
                broken.append(index)
        return broken

    def _look_up(
        self, indices: Sequence[Index], wants: list[Want], promised: list[tuple[Index, Future[np.ndarray]]]
    ) -> None:
        """Place what is in memory; add what must be fetched to `wants`, and what another window fetches to `promised`."""
        for index in indices:
            box = self.boxes[index]
            if self.cache is None:
                wants.append(Want(index, range(box.inside[0].start, box.inside[0].stop)))
                continue
            found = self.cache.ask(index)
            if found is None:
                wants.append(Want(index, range(self.survey.chunks[0])))
            elif isinstance(found, np.ndarray):
                self._place(index, found, 0)
            else:
                promised.append((index, found))
        self.transfers.meter.add(cache_hits=len(indices) - len(wants), cache_misses=len(wants))

    def _learn_heads(self, wants: Sequence[Want]) -> None:
        asked: dict[str, tuple[Head, Want, Future[Bytes | None]]] = {}
        for want in wants:
            head = self.layout.head(want, whole=self.whole)
            if head is not None and head.key not in asked:
                asked[head.key] = head, want, self._ask(head)
        failed: SurveyError | None = None
        for head, want, future in asked.values():
            try:
                try:
                    self.layout.learn(head, future.result())
                except ValueError:  # spoilt on its way, or on the disk
                    self.transfers.meter.add(retries=1)
                    self.layout.learn(head, self._ask(head, anew=True).result())
            except Exception as error:  # noqa: BLE001 - becomes the sentence, once none is on its way any more
                failed = self._sentence(want.chunk, error)
        if failed is not None:
            raise failed

    def _ask(self, head: Head, *, anew: bool = False) -> Future[Bytes | None]:
        start, stop = (head.size, None) if head.size < 0 else (0, head.size)
        return self._fetch(head.key, start, stop, anew=anew)

    @property
    def whole(self) -> bool:
        """Whether objects are fetched as a whole: to serve any window from the disk, or to be compared with a checksum."""
        return self.transfers.disk is not None or self.survey.storage.verify

    def _fetch(self, key: str, start: int, stop: int | None, *, anew: bool = False) -> Future[Bytes | None]:
        return self.transfers.fetch(self.survey.objects, key, start, stop, keep_as=self.survey.identity, anew=anew)

    def _send(self, fetch: Fetch) -> None:
        self.transfers.take(fetch.memory)
        done: Future[None] = Future()
        self.done.append(done)

        def arrived(coming: Future[Bytes | None]) -> None:
            try:
                self.transfers.decoders.submit(self._receive, fetch, coming, done)
            except RuntimeError as error:  # closed meanwhile, or no thread to be had
                self._fail(fetch, ClosedError() if self.transfers.closed else error, done)

        try:
            self._fetch(fetch.key, fetch.start, fetch.end).add_done_callback(arrived)
        except Exception as error:  # noqa: BLE001 - closed meanwhile, or no thread to be had
            self._fail(fetch, error, done)

    def _receive(self, fetch: Fetch, coming: Future[Bytes | None], done: Future[None]) -> None:
        """Decode what has come and put it into the window. Runs in a decoding thread."""
        if done.done():  # given up for want of a thread, and found one after all
            return
        failed: SurveyError | None = None
        for part in fetch.parts:
            try:
                data = coming.result()
                if data is None:
                    self._fill_in(part.want)
                else:
                    self._decode(fetch, part, data)
            except BaseException as error:  # noqa: BLE001 - the window's reader gets it as a sentence
                failed = self._sentence(part.want.chunk, error)
                self._abandon([part.want.chunk], failed)
        self.transfers.give(fetch.memory)
        if failed is None:
            done.set_result(None)
        else:
            done.set_exception(failed)

    def _decode(self, fetch: Fetch, part: Part, data: Bytes) -> None:
        began = time.thread_time()
        rows, size = part.want.rows, self.codec.bytes
        room = self.transfers.room(size) if self.cache is None else np.empty(size, np.uint8)
        try:
            values = self.codec.decode(_payload(fetch, part, data), rows, room)
        except ValueError:
            # Bytes may have been changed on their way, or on the disk; what is damaged in the store stays so. The head,
            # too, may have told the wrong ones: then all of the chunk.
            self.transfers.meter.add(retries=1)
            if part.frame is None:
                again = self._fetch(fetch.key, fetch.start, fetch.end, anew=True).result()
                payload = _payload(fetch, part, again or b"")
            else:
                self.layout.forget(fetch.key)
                payload = Payload(self._fetch(fetch.key, 0, None, anew=True).result() or b"")
            values = self.codec.decode(payload, rows, room)
        if self.cache is not None and values.nbytes < len(data):
            values = values.copy()  # a part of what came would keep all of it in memory
        self._bring(part.want, values)
        self.transfers.meter.add(decode_seconds=time.thread_time() - began, bytes_decoded=values.nbytes)

    def _fill_in(self, want: Want) -> None:
        """An absent chunk is made of the fill value; one of a copy, of the amplitudes themselves."""
        self.reader.check_presence()
        self.transfers.meter.add(absent_chunks=1)
        fill = np.zeros((), self.codec.dtype) if self.survey.array.fill_value is None else self.survey.array.fill_value
        values = np.broadcast_to(np.asarray(fill, self.codec.dtype), (len(want.rows), *self.codec.shape[1:]))
        if self.survey.amplitudes is not self.survey.array:
            i, x, t = chunk_region(self.survey, want.chunk)
            i = slice(i.start + want.rows.start, min(i.start + want.rows.stop, i.stop))
            try:
                stored = np.asarray(self.survey.amplitudes[i, x, t])
            except Exception as error:
                raise self._sentence(want.chunk, error) from error
            values = values.copy()
            values[tuple(slice(n) for n in stored.shape)] = stored
        self._bring(want, values)

    def _bring(self, want: Want, values: np.ndarray) -> None:
        """Put rows of a chunk into the window, and a whole chunk into the cache too."""
        self._place(want.chunk, values, want.rows.start)
        if self.cache is not None:
            self.cache.bring(want.chunk, values)

    def _place(self, index: Index, values: np.ndarray, first: int) -> None:
        """Put `values`, the rows of a chunk from `first` on, into the window."""
        box = self.boxes[index]
        rows, lines, samples = box.inside
        values = values[rows.start - first : rows.stop - first, lines, samples]
        scale_into(self.window[box.target], values, self.reader.statistics, self.reader.kind)
        found = holds_data(values)
        self.holds_data[self.depth[box.target[2].start]][box.target[:2]] = True if found is None else found

    def _sentence(self, index: Index, error: BaseException) -> SurveyError:
        return chunk_error(self.survey, index, error)

    def _fail(self, fetch: Fetch, error: BaseException, done: Future[None]) -> None:
        said = self._sentence(fetch.parts[0].want.chunk, error)
        self._abandon([part.want.chunk for part in fetch.parts], said)
        self.transfers.give(fetch.memory)
        done.set_exception(said)

    def _abandon(self, indices: Sequence[Index], error: BaseException) -> None:
        """Tell other windows that these chunks do not come from here."""
        if self.cache is not None:
            for index in indices:
                self.cache.fail(index, error)


def chunk_region(survey: Survey, index: Index) -> Slices:
    """The part of the survey that chunk `index` covers."""
    i, x, t = (
        slice(number * chunk, min((number + 1) * chunk, size))
        for number, chunk, size in zip(index, survey.chunks, survey.shape, strict=True)
    )
    return i, x, t


def chunk_error(survey: Survey, index: Index, error: BaseException) -> SurveyError:
    """The sentence for a chunk that cannot be had."""
    if isinstance(error, SurveyError) and not isinstance(error, DamagedError):
        return error
    if isinstance(error, CancelledError):
        return ClosedError()
    if isinstance(error, (ValueError, DamagedError)):
        return SurveyError(
            f"{survey.url}: chunk {index} cannot be read: {error}; ingest the survey again if the chunk is damaged"
        )
    return SurveyError(f"chunk {index} of {explain(error, survey.url, survey.storage)}")


def _payload(fetch: Fetch, part: Part, data: Bytes) -> Payload:
    if part.stop == WHOLE:
        return Payload(data)
    piece = memoryview(data)[part.start - fetch.start : part.stop - fetch.start]
    # Chunks of a shard may share bytes: what is changed in one must not show in another.
    return Payload(piece if len(fetch.parts) == 1 else piece.toreadonly(), part.at, part.frame)


def _boxes(origin: Index, shape: Sequence[int], chunks: Index) -> Iterator[tuple[Index, _Box]]:
    """Where a window meets the chunks, in storage order."""
    stop = [o + n for o, n in zip(origin, shape, strict=True)]
    ranges = [range(o // c, (e - 1) // c + 1) for o, e, c in zip(origin, stop, chunks, strict=True)]
    for i, x, t in itertools.product(*ranges):
        inside, target = [], []
        for o, e, number, size in zip(origin, stop, (i, x, t), chunks, strict=True):
            first, last = max(o, number * size), min(e, (number + 1) * size)
            inside.append(slice(first - number * size, last - number * size))
            target.append(slice(first - o, last - o))
        yield (i, x, t), _Box((inside[0], inside[1], inside[2]), (target[0], target[1], target[2]))
