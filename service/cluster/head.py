"""Our own Ray head: started once, found again after a restart, ended by its process id.

The head is a process of its own session, so it outlives the service: killing the service kills no job.
Everything listens on loopback, and Ray asks for a token (`RAY_AUTH_MODE=token`): without one, any local
process could run code through the head. The token is in `STATE_DIR/ray_token`, readable by its owner only.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from sfm.spec import SfmError

START_SECONDS = 120.0
STOP_SECONDS = 30.0
ORPHAN_SECONDS = 5.0


class HeadError(SfmError):
    """Our Ray head cannot be started, or was not found."""


@dataclass(frozen=True)
class Head:
    """A running head, as recorded in `STATE_DIR/ray.json`."""

    pid: int
    started: str
    """Start time of process `pid`, as the system counts it: a process id alone may have been given away."""
    address: str
    """URL of its dashboard, which is also its job API."""
    temp_dir: str
    """Ray's directory: logs, sockets."""
    token_path: str
    """File with the token that every client sends."""

    @property
    def alive(self) -> bool:
        return process_started(self.pid) == self.started

    @property
    def gcs_address(self) -> str:
        """`HOST:PORT` for `ray.init(address=...)`."""
        return (Path(self.temp_dir) / "ray_current_cluster").read_text().strip()

    @property
    def environment(self) -> dict[str, str]:
        """What `ray job submit` and other Ray clients need to reach this head."""
        return {
            "RAY_API_SERVER_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": self.token_path,
        }

    @property
    def token(self) -> str:
        return Path(self.token_path).read_text().strip()


def find(state_dir: Path) -> Head | None:
    """The head recorded in `state_dir`, if its process is alive."""
    head = _recorded(state_dir)
    return head if head and head.alive else None


def start_or_rejoin(state_dir: Path, *, num_cpus: int) -> Head:
    """The head of `state_dir`: the one that runs, or a new one with `num_cpus` logical CPUs.

    Returns when its job API answers (some 10 seconds for a new head).

    Raises:
        HeadError: Ray did not start; the sentence quotes the end of its log.
    """
    if head := find(state_dir):
        return head
    state_dir.mkdir(parents=True, exist_ok=True)
    token_path = state_dir / "ray_token"
    with os.fdopen(os.open(token_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(secrets.token_hex(32))
    # Unix socket paths hold at most 107 bytes, so Ray's directory is never below state_dir.
    temp_dir = tempfile.mkdtemp(prefix="sfm-ray-", dir="/tmp" if os.access("/tmp", os.W_OK) else None)
    dashboard, agent, client = _free_ports(8265, 0, 0)
    command = [
        *(sys.executable, "-c", "from ray.scripts.scripts import main; main()"),
        *("start", "--head", "--block", "--disable-usage-stats", "--num-cpus", str(num_cpus)),
        *("--node-ip-address", "127.0.0.1", "--port", "0"),
        *("--include-dashboard", "true", "--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard)),
        *("--dashboard-agent-listen-port", str(agent), "--ray-client-server-port", str(client), "--temp-dir", temp_dir),
        *("--min-worker-port", "0", "--max-worker-port", "0"),
    ]
    log_path = state_dir / "ray_head.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            env=_environment(token_path),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    head = Head(
        pid=process.pid,
        started=process_started(process.pid) or "",
        address=f"http://127.0.0.1:{dashboard}",
        temp_dir=temp_dir,
        token_path=str(token_path),
    )
    # Recorded before it answers: a service killed now finds this head instead of starting another.
    _write(state_dir / "ray.json", json.dumps(asdict(head), indent=1))
    if not _until(lambda: not head.alive or _answers(head), START_SECONDS) or not head.alive:
        if not stop(state_dir):
            _forget(state_dir, head)
        tail = " ".join(log_path.read_text(errors="replace").split()[-40:])
        raise HeadError(f"Ray did not start here; the end of {log_path}: {tail}")
    return head


def stop(state_dir: Path) -> bool:
    """End the head of `state_dir` and every job on it; whether there was one. Other Ray clusters are not touched."""
    head = find(state_dir)
    if head is None:
        return False
    family = _descendants(head.pid)
    os.kill(head.pid, signal.SIGTERM)  # `ray start --block` then ends its children
    if not _until(lambda: not head.alive, STOP_SECONDS):
        os.kill(head.pid, signal.SIGKILL)
    # Drivers of jobs notice only after a while that their cluster has gone.
    if not _until(lambda: not _survivors(family), ORPHAN_SECONDS):
        for pid in _survivors(family):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _until(lambda: not _survivors(family), ORPHAN_SECONDS)
    _forget(state_dir, head)
    return True


def _recorded(state_dir: Path) -> Head | None:
    try:
        return Head(**json.loads((state_dir / "ray.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _forget(state_dir: Path, head: Head) -> None:
    if _recorded(state_dir) == head:  # a running service may have started another meanwhile
        (state_dir / "ray.json").unlink(missing_ok=True)
    shutil.rmtree(head.temp_dir, ignore_errors=True)


def process_started(pid: int) -> str | None:
    """When process `pid` started, as an opaque text; None if there is no such process or it has ended."""
    try:
        # The name of the program may hold spaces and brackets; fields are counted from the last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return shown.stdout.strip() or None
    return None if fields[0] in "ZX" else fields[19]


def _descendants(pid: int) -> dict[int, str]:
    """All processes below `pid`, with their start times. Needs /proc; empty without it."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
    found: set[int] = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {p: started for p in found - {pid} if (started := process_started(p))}


def _survivors(family: dict[int, str]) -> list[int]:
    return [pid for pid, started in family.items() if process_started(pid) == started]


def _environment(token_path: Path) -> dict[str, str]:
    """The head's environment, which workers and drivers inherit."""
    env = {k: v for k, v in os.environ.items() if k not in {"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN"}}
    return env | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the one switch that makes Ray name this node 127.0.0.1
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # default 30: to end the head is to end its jobs, now
        "RAY_JOB_STOP_WAIT_TIME_S": "20",  # default 3: too short for a driver to wind down
    }


def _free_ports(*preferred: int) -> list[int]:
    """A free port on loopback for each preferred one: that one if it is free (0: any)."""
    with contextlib.ExitStack() as held:  # all are held at once, so that no two are the same
        ports = []
        for port in preferred:
            probe = held.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                probe.bind(("127.0.0.1", 0))
            ports.append(int(probe.getsockname()[1]))
        return ports


def _answers(head: Head) -> bool:
    """Whether the dashboard answers and knows a node that is alive."""
    url = f"{head.address}/api/v0/nodes?limit=1"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {head.token}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            nodes = json.load(response)["data"]["result"]["result"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return any(node["state"] == "ALIVE" for node in nodes)


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _write(path: Path, text: str) -> None:
    """Replace `path` in one step, so that no reader sees half of it."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)
