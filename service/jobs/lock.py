"""One service per state directory: two would submit the same jobs."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sfm.spec import SfmError


class Occupied(SfmError):
    """Another service uses this state directory."""


@contextmanager
def only_one(state_dir: Path) -> Iterator[None]:
    """Hold `state_dir` for this process. The system lets go of it however the process ends.

    Raises:
        Occupied
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Occupied(f"another 'sfm serve' uses {state_dir}; give this one its own --state-dir") from None
        yield
