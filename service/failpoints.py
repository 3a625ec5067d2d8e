"""Named places where a test can let the process die, to prove that no instant is a bad one."""

from __future__ import annotations

import os
import signal


def failpoint(name: str) -> None:
    """Kill this process (SIGKILL, no clean-up) if `SFM_FAILPOINT` names this place."""
    if os.environ.get("SFM_FAILPOINT") == name:
        os.kill(os.getpid(), signal.SIGKILL)
