"""Where the chunks of an array lie: one object each, or many in a shard; and what must be fetched for some of their rows."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import zarr

from sfm.survey import codecs
from sfm.survey.blosc import Frame
from sfm.survey.clients import SurveyError
from sfm.survey.objects import Bytes

Index = tuple[int, int, int]

SMALLEST_SAVING = 2**18
"""Bytes that fetching a part of a chunk must save: its head is a request of its own."""
WHOLE = -1
_GAP = 2**17
_LONGEST = 2**24
_HEADS = 100_000
_OBSCURE = object()  # a head that does not reach to the end of the offsets: such a chunk is read whole


class Want(NamedTuple):
    """Rows (along inline) of one chunk."""

    chunk: Index
    rows: range


class Head(NamedTuple):
    """What must be known of an object before the bytes to fetch are: its first bytes, or its last where negative."""

    key: str
    size: int


class Part(NamedTuple):
    """A chunk, or some rows of it, within fetched bytes."""

    want: Want
    start: int
    """First byte in the object."""
    stop: int
    """End in the object; WHOLE for all of the object."""
    at: int
    """Offset in the stored chunk of the first byte."""
    frame: Frame | None


class Fetch(NamedTuple):
    """One request, and the chunks it brings."""

    key: str
    start: int
    stop: int
    """WHOLE for all of the object."""
    parts: list[Part]
    memory: int
    """Bytes it takes on its way: clients hold a body twice while they put its pieces together."""

    @property
    def end(self) -> int | None:
        """Where it stops in the object; None at its end."""
        return None if self.stop == WHOLE else self.stop


class Layout:
    """Plans requests for the chunks of one array. Threads may share it.

    Attributes:
        codec: decodes its chunks.
        memory: bytes that one whole chunk takes on its way.

    Raises:
        SurveyError: a codec is not known here.
    """

    def __init__(self, array: zarr.Array, where: str) -> None:
        self._metadata: Any = array.metadata
        self._path, self._where = array.path, where
        self._shard: Index | None = None
        if self._metadata.zarr_format == 2:
            self.codec = codecs.of_v2(array)
        else:
            stated: list[Any] = [codec.to_dict() for codec in self._metadata.codecs]
            if stated[0]["name"] == "sharding_indexed":
                settings = stated[0]["configuration"]
                self.codec = codecs.of_v3(array.chunks, array.dtype, settings["codecs"], where)
                self._set_shards(array, settings, where)
            else:
                self.codec = codecs.of_v3(array.chunks, array.dtype, stated, where)
        self._heads: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        self.memory = 2 * self.codec.bytes

    def _set_shards(self, array: zarr.Array, settings: dict[str, Any], where: str) -> None:
        if array.shards is None:
            raise SurveyError(f"{where}: its shards have no shape")
        i, x, t = (outer // inner for outer, inner in zip(array.shards, array.chunks, strict=True))
        self._shard = (i, x, t)
        names = [codec["name"] for codec in settings["index_codecs"]]
        if names not in (["bytes"], ["bytes", "crc32c"]):
            raise SurveyError(f"{where}: the index of its shards is stored by {names}, which is not read here")
        self._checked = len(names) == 2
        self._index_bytes = 16 * math.prod(self._shard) + 4 * self._checked
        self._index_last = str(getattr(settings["index_location"], "value", settings["index_location"])) == "end"

    @property
    def metadata_key(self) -> str:
        """The object that is there as long as the array is."""
        return f"{self._path}/{'.zarray' if self._metadata.zarr_format == 2 else 'zarr.json'}"

    def head(self, want: Want, *, whole: bool) -> Head | None:
        """What must be fetched first, if it is not known yet; :meth:`learn` takes it."""
        key = self._key(want.chunk)
        with self._lock:
            if key in self._heads:
                self._heads.move_to_end(key)
                return None
        if self._shard is not None:
            return Head(key, -self._index_bytes if self._index_last else self._index_bytes)
        if whole or not self.codec.head or not self._pays(want):
            return None
        return Head(key, self.codec.head)

    def learn(self, head: Head, data: Bytes | None) -> None:
        """Keep what `head` asked for; None is an object that is not there.

        Raises:
            ValueError: it is damaged.
        """
        known: Any = None
        if data is not None:
            known = self._index(data) if self._shard is not None else self.codec.frame(data) or _OBSCURE
        with self._lock:
            self._heads[head.key] = known
            while len(self._heads) > _HEADS:
                self._heads.popitem(last=False)

    def forget(self, key: str) -> None:
        """What was learnt about an object may be wrong: ask again."""
        with self._lock:
            self._heads.pop(key, None)

    def plan(self, wants: Iterable[Want], *, whole: bool) -> tuple[list[Fetch], list[Want]]:
        """The requests for chunks whose heads are known, and those that are known not to be stored.

        Args:
            whole: fetch whole chunks, each for itself, even where a part would do.

        Raises:
            SurveyError: so many heads are known that one of these was forgotten.
        """
        fetches: list[Fetch] = []
        absent: list[Want] = []
        shards: dict[str, list[Part]] = {}
        for want in wants:
            key = self._key(want.chunk)
            with self._lock:
                known = self._heads.get(key, ...)
            if self._shard is not None:
                if known is ...:
                    raise SurveyError(
                        f"{self._where}: the index of the shard of chunk {want.chunk} was forgotten; read smaller windows"
                    )
                place = known[self._within(want.chunk)] if known is not None else (-1, 0)
                if place[1] == 0:
                    absent.append(want)
                else:
                    start = int(place[0])
                    shards.setdefault(key, []).append(Part(want, start, start + int(place[1]), 0, None))
            elif known is None:
                absent.append(want)
            else:
                frame = known if isinstance(known, Frame) else None
                some = not whole and self._pays(want) and (frame is not None or not self.codec.head)
                fetches.append(self._some(key, want, frame) if some else self._whole(key, want))
        for key, parts in shards.items():
            fetches += _coalesce(key, parts, self.memory, gap=-_LONGEST if whole else _GAP)
        return fetches, absent

    def _whole(self, key: str, want: Want) -> Fetch:
        return Fetch(key, 0, WHOLE, [Part(want, 0, WHOLE, 0, None)], self.memory)

    def _some(self, key: str, want: Want, frame: Frame | None) -> Fetch:
        start, stop = self.codec.span(want.rows, frame)
        return Fetch(key, start, stop, [Part(want, start, stop, start, frame)], 2 * (stop - start))

    def _pays(self, want: Want) -> bool:
        """Whether fetching these rows alone saves enough."""
        if not self.codec.divisible:
            return False
        spared = self.codec.shape[0] - len(want.rows)
        return spared * self.codec.bytes // self.codec.shape[0] >= SMALLEST_SAVING

    def _key(self, index: Index) -> str:
        if self._shard is not None:
            index = (index[0] // self._shard[0], index[1] // self._shard[1], index[2] // self._shard[2])
        return f"{self._path}/{self._metadata.encode_chunk_key(index)}"

    def _within(self, index: Index) -> Index:
        assert self._shard is not None
        return index[0] % self._shard[0], index[1] % self._shard[1], index[2] % self._shard[2]

    def _index(self, data: Bytes) -> np.ndarray:
        """Offset and length of every chunk of a shard, int64 [I, X, T, 2]; length 0 where it is not stored."""
        assert self._shard is not None
        if len(data) != self._index_bytes:
            raise ValueError(f"the index of its shard has {len(data)} bytes, not {self._index_bytes}")
        index = np.frombuffer(codecs.check_crc32c(data) if self._checked else data, "<u8")
        index = np.where(index == 2**64 - 1, 0, index).astype(np.int64)
        return index.reshape(*self._shard, 2)


def _coalesce(key: str, parts: Sequence[Part], memory: int, gap: int) -> list[Fetch]:
    """Requests for chunks of one shard: those within `gap` bytes of each other in the file come together."""
    found: list[Fetch] = []
    for part in sorted(parts, key=lambda p: p.start):
        last = found[-1] if found else None
        if last is not None and part.start - last.stop <= gap and part.stop - last.start <= _LONGEST:
            stop = max(last.stop, part.stop)
            found[-1] = last._replace(stop=stop, parts=[*last.parts, part], memory=last.memory + memory)
        else:
            found.append(Fetch(key, part.start, part.stop, [part], memory))
    return found
