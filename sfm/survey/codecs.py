"""From stored bytes to a chunk: the codecs of a Zarr array, v2 or v3, and which bytes hold some of its rows."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import google_crc32c
import numcodecs
import numpy as np
import zarr

from sfm.survey import blosc
from sfm.survey.clients import SurveyError
from sfm.survey.objects import Bytes


class Payload(NamedTuple):
    """Stored bytes of a chunk: all of them, or a part. To be decoded once: where they can be written to, they may be."""

    data: Bytes
    at: int | None = None
    """Offset in the stored chunk at which `data` begins; None where it is all of the chunk."""
    frame: blosc.Frame | None = None
    """Header of the chunk, where only a part of a Blosc chunk is here."""


class ChunkCodec:
    """Decodes the chunks of one array.

    Attributes:
        shape: voxels of a chunk.
        dtype: of the stored values, byte order included.
        divisible: whether some rows (along inline) can be decoded from a part of the bytes.
        head: first bytes of a stored chunk that tell which part; 0 where nothing need be known.
    """

    def __init__(self, shape: Sequence[int], dtype: np.dtype, steps: Sequence[Any], transpose: Sequence[int] | None):
        i, x, t = shape
        self.shape = (i, x, t)
        self.dtype = dtype
        self.bytes = math.prod(shape) * dtype.itemsize
        self._steps = list(steps)  # outermost first
        self._transpose = transpose
        self._blosc = [isinstance(step, _Blosc) for step in steps] == [True]
        self.divisible = transpose is None and (self._blosc or not steps)
        self.head = blosc.head_bytes(self.bytes) if self._blosc else 0
        self._row = self.bytes // i

    def frame(self, head: Bytes) -> blosc.Frame | None:
        """What the first bytes of a Blosc chunk say; None where they do not reach to the end of its offsets.

        Raises:
            ValueError: the chunk is damaged.
        """
        return blosc.parse(head, self.bytes)

    def span(self, rows: range, frame: blosc.Frame | None) -> tuple[int, int]:
        """The stored bytes that `rows` of a divisible chunk need, of a Blosc chunk by its `frame`."""
        start, stop = rows.start * self._row, rows.stop * self._row
        return (start, stop) if frame is None else frame.span(start, stop)

    def decode(self, payload: Payload, rows: range, room: np.ndarray) -> np.ndarray:
        """`rows` of a chunk, [rows, X, T] of `dtype`: a view of `room`, or of the payload where that needs no decoding.

        Args:
            room: uint8, at least `bytes`; overwritten.

        Raises:
            ValueError: the bytes are damaged.
        """
        try:
            return self._decode(payload, rows, room)
        except (ValueError, MemoryError):
            raise
        except Exception as error:  # each codec has its own
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def _decode(self, payload: Payload, rows: range, room: np.ndarray) -> np.ndarray:
        if not self.divisible:
            return self._whole(payload.data, room)[rows.start : rows.stop]
        start, stop = rows.start * self._row, rows.stop * self._row
        if self._blosc:
            flat = self._from_blosc(payload, start, stop, room)
        else:
            flat, at = np.frombuffer(payload.data, np.uint8), payload.at or 0
            if len(flat) < stop - at or (payload.at is None and len(flat) != self.bytes):
                has = f"{len(flat)} bytes" if payload.at is None else f"fewer than {stop} bytes"
                raise ValueError(f"it has {has}, not {self.bytes}")
            flat = flat[start - at : stop - at]
        return flat.view(self.dtype).reshape(len(rows), *self.shape[1:])

    def _from_blosc(self, payload: Payload, start: int, stop: int, room: np.ndarray) -> np.ndarray:
        """Decoded bytes `start` to `stop` of a chunk, uint8."""
        frame, data = payload.frame, memoryview(payload.data)
        if frame is None:
            frame = blosc.parse(data, self.bytes)
            # Its C library trusts the header and would read beyond the end of what is there.
            if frame is None or len(data) != frame.stored:
                stated = "more" if frame is None else frame.stored
                raise ValueError(f"it has {len(data)} bytes; its header states {stated}")
        low, high = frame.span(start, stop)
        at = payload.at or 0
        if high - at > len(data):
            raise ValueError(f"it ends after {at + len(data)} bytes; its header states {frame.stored}")
        if frame.starts is None:
            return np.frombuffer(data, np.uint8)[low - at : high - at]
        wanted = frame.blocks(start, stop)
        first = wanted.start * frame.block
        size = min(wanted.stop * frame.block, frame.size) - first
        # A header that came with a part was not looked at: one is made of what is known.
        looked_at = payload.frame is None
        numcodecs.blosc.decompress(
            data if looked_at and size == frame.size else frame.cut(data, at, wanted), room[:size]
        )
        return room[start - first : stop - first]

    def _whole(self, data: Any, room: np.ndarray) -> np.ndarray:
        for number, step in enumerate(self._steps, start=1):
            last = number == len(self._steps)
            data = step.decode(data, room[: self.bytes] if last and step.into else None)
        flat = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data.reshape(-1).view(np.uint8)
        if len(flat) != self.bytes:
            raise ValueError(f"it decodes to {len(flat)} bytes, not {self.bytes}")
        values = flat.view(self.dtype)
        if self._transpose is None:
            return values.reshape(self.shape)
        stored = [self.shape[axis] for axis in self._transpose]
        return values.reshape(stored).transpose(np.argsort(self._transpose))


class _Step:
    """A codec of numcodecs."""

    into = False
    """Whether it writes into given room."""

    def __init__(self, codec: Any) -> None:
        self._codec = codec

    def decode(self, data: Any, room: np.ndarray | None) -> Any:
        del room
        return self._codec.decode(data)


class _Blosc(_Step):
    into = True

    def decode(self, data: Any, room: np.ndarray | None) -> Any:
        # Its C library trusts the header and would read beyond the end of what is there.
        if len(data) < blosc.HEADER.size or blosc.HEADER.unpack_from(data)[6] != len(data):
            raise ValueError(f"it has {len(data)} bytes; its Blosc header states another number")
        if room is not None and blosc.HEADER.unpack_from(data)[4] != len(room):  # or what was there would show
            raise ValueError(f"its Blosc header states another size than {len(room)} bytes")
        return self._codec.decode(data, room)


class _Crc32c(_Step):
    def __init__(self) -> None:
        super().__init__(None)

    def decode(self, data: Any, room: np.ndarray | None) -> Any:
        del room
        return check_crc32c(data)


def check_crc32c(data: Bytes) -> memoryview:
    """`data` without the CRC32C checksum in its last four bytes.

    Raises:
        ValueError: the checksum differs.
    """
    value, stated = memoryview(data)[:-4], bytes(memoryview(data)[-4:])
    if len(stated) < 4 or struct.unpack("<I", stated)[0] != google_crc32c.value(bytes(value)):
        raise ValueError("its CRC32C checksum differs from its bytes")
    return value


def _step(codec: Any) -> _Step:
    return _Blosc(codec) if codec.codec_id == "blosc" else _Step(codec)


def of_v2(array: zarr.Array) -> ChunkCodec:
    """The codec of a Zarr v2 array."""
    metadata: Any = array.metadata
    steps = [metadata.compressor] if metadata.compressor is not None else []
    steps += reversed(metadata.filters or ())
    transpose = (2, 1, 0) if metadata.order == "F" else None
    return ChunkCodec(array.chunks, metadata.dtype.to_native_dtype(), [_step(s) for s in steps], transpose)


_ZARR_V3 = {"blosc": numcodecs.Blosc, "zstd": numcodecs.Zstd, "gzip": numcodecs.GZip}


def of_v3(shape: Sequence[int], dtype: np.dtype, codecs: Sequence[dict[str, Any]], where: str) -> ChunkCodec:
    """The codec of a Zarr v3 array, or of the chunks inside its shards, from the codecs that its metadata states.

    Raises:
        SurveyError: one of them is not known here.
    """
    steps: list[_Step] = []
    transpose: Sequence[int] | None = None
    for codec in codecs:
        name, settings = codec["name"], dict(codec.get("configuration") or {})
        if name == "bytes":
            dtype = dtype.newbyteorder(">" if settings.get("endian") == "big" else "<")
        elif name == "transpose" and transpose is None:
            transpose = tuple(settings["order"])
        elif name == "crc32c":
            steps.insert(0, _Crc32c())
        elif name in _ZARR_V3:
            steps.insert(0, _step(_ZARR_V3[name]()))
        elif name.startswith("numcodecs."):
            steps.insert(0, _step(numcodecs.get_codec({"id": name.removeprefix("numcodecs."), **settings})))
        else:
            raise SurveyError(f"{where}: its chunks are stored by the Zarr codec '{name}', which is not read here")
    return ChunkCodec(shape, dtype, steps, transpose)
