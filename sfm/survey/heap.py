"""The C library's heap, in processes that do little but read."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # M_..., malloc.h of the GNU C library


def keep_pages() -> bool:
    """Let the heap keep the pages of bodies and windows that were freed, for the next ones.

    By default they go back to the kernel, which clears them anew for every chunk and window: that costs a fifth to a
    third of all that reading costs. The process keeps about the most that it ever held at a time. Threads that come
    later share what heaps there are, rather than each keeping its own. What trains should not do this: its tensors
    need the memory.

    Returns:
        Whether the C library has such settings.
    """
    try:
        change = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all(change(name, value) for name, value in ((_TRIM_THRESHOLD, 2**30), (_MMAP_MAX, 0), (_ARENA_MAX, 1)))
