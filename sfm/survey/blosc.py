"""Parts of a Blosc 1 chunk: which bytes hold which rows, and how to decode those alone.

A chunk is a header of 16 bytes, the offsets of its blocks (int32 each), and the blocks, which are compressed
independently (c-blosc, README_CHUNK_FORMAT.rst). So a range of blocks with a header of its own is a chunk again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

HEADER = struct.Struct("<BBBBIII")  # version, version of the codec, flags, item size, bytes, block bytes, stored bytes
_STORED_AS_IS = 0x2
_USUAL_BLOCKS = 96


@dataclass(frozen=True, slots=True)
class Frame:
    """The header of one Blosc chunk."""

    fixed: bytes
    """Version, version of the codec, flags, item size."""
    size: int
    """Bytes when decoded."""
    block: int
    """Decoded bytes of a block; the last may hold fewer."""
    stored: int
    """Bytes of the whole chunk as stored."""
    starts: np.ndarray | None
    """Where each block begins, int64 [blocks]; None where the bytes are stored as they are."""

    def blocks(self, start: int, stop: int) -> range:
        """The blocks that hold decoded bytes `start` to `stop`. Not a short last one alone, which is no chunk."""
        first = start // self.block
        if first and (first + 1) * self.block > self.size:
            first -= 1
        return range(first, -(-stop // self.block))

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The stored bytes from which decoded bytes `start` to `stop` can be made.

        Before the first block, they have room for the header that :meth:`cut` makes.
        """
        if self.starts is None:
            return HEADER.size + start, HEADER.size + stop
        wanted = self.blocks(start, stop)
        low, high = self._stored(wanted)
        return low - _header_bytes(wanted), high

    def cut(self, payload: memoryview, at: int, wanted: range) -> memoryview | bytes:
        """A chunk of the blocks `wanted` alone, from stored bytes that begin `at` an offset of this one.

        Where these can be written to, the header is put before the blocks in place of what came before them.
        """
        if self.starts is None:
            raise ValueError("stored as it is: there is nothing to decode")
        low, high = self._stored(wanted)
        shift = _header_bytes(wanted) - low
        starts = (self.starts[wanted.start : wanted.stop] + shift).astype("<i4").tobytes()
        decoded = min(wanted.stop * self.block, self.size) - wanted.start * self.block
        head = self.fixed + struct.pack("<III", decoded, self.block, high + shift) + starts
        first = low - at - len(head)
        if payload.readonly or first < 0:
            return b"".join((head, payload[low - at : high - at]))
        payload[first : low - at] = head
        return payload[first : high - at]

    def _stored(self, wanted: range) -> tuple[int, int]:
        """The stored bytes that hold the blocks `wanted`."""
        assert self.starts is not None
        first = self.starts[wanted.start : wanted.stop]
        # Threads that compress write blocks in any order: one ends where the next in the file begins.
        ends = np.append(np.sort(self.starts), self.stored)
        last = ends[np.searchsorted(ends, first, side="right")]
        return int(first.min()), int(last.max())


def _header_bytes(wanted: range) -> int:
    """Of a chunk of so many blocks."""
    return HEADER.size + 4 * len(wanted)


def head_bytes(size: int) -> int:
    """First bytes of a chunk that surely hold its header, and nearly always its offsets too."""
    return HEADER.size + 4 * max(_USUAL_BLOCKS, size // 2**18 + 1)


def parse(head: memoryview | bytes, size: int) -> Frame | None:
    """Read the header of a chunk that decodes to `size` bytes.

    Returns:
        None where `head` does not reach to the end of the offsets.

    Raises:
        ValueError: this is no such chunk.
    """
    if len(head) < HEADER.size:
        raise ValueError(f"its {len(head)} bytes are fewer than a Blosc header")
    version, _, flags, _, nbytes, block, stored = HEADER.unpack_from(head)
    if version not in (1, 2) or nbytes != size or not 0 < block <= max(nbytes, 1):
        raise ValueError(f"it has no valid Blosc header for {size} bytes")
    fixed = bytes(head[:4])
    if flags & _STORED_AS_IS:
        return Frame(fixed, nbytes, block, stored, None)
    count = -(-nbytes // block)
    end = HEADER.size + 4 * count
    if len(head) < end:
        return None
    starts = np.frombuffer(head, "<i4", count, HEADER.size).astype(np.int64)
    if starts.min() < end or starts.max() >= stored:
        raise ValueError("the offsets of its blocks lie outside of it")
    return Frame(fixed, nbytes, block, stored, starts)
