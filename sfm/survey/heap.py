"""The C library's heap, in processes that do little but read."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_..., malloc.h of the GNU C library


def keep_pages() -> bool:
    """Let the heap keep the pages of bodies and windows that were freed, for the next ones.

    By default they go back to the kernel, which clears them anew for every chunk: that costs about a fifth of all that
    reading costs. Up to 1 GiB may stay with the process. What trains should not do this: its tensors need the memory.

    Returns:
        Whether the C library has such a setting.
    """
    try:
        change = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(change(_MMAP_THRESHOLD, 2**25)) and bool(change(_TRIM_THRESHOLD, 2**30))
