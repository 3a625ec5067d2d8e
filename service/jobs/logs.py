"""Logs of jobs: one file per job, copied from Ray while the job runs, readable after Ray is gone.

Ray gives a job's log from its first byte only, so a copy that was interrupted (the service was killed, the
connection broke) skips as many bytes as the file already holds: nothing is lost, nothing is repeated.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol

from sfm.spec import SfmError

log = logging.getLogger(__name__)

CHUNK = 1 << 16
LOOK_SECONDS = 0.2
"""How often a follower looks for new bytes."""
RETRY_SECONDS = 1.0
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Source(Protocol):
    """Where logs come from."""

    async def logs(self, submission_id: str) -> str: ...

    def tail(self, submission_id: str) -> AsyncIterator[str]: ...


class Logs:
    """Log files of all jobs under `directory`."""

    def __init__(self, directory: Path, source: Source, on_end: Callable[[], None] = lambda: None) -> None:
        """`on_end` is called when a job's log ends: most often the job has ended too."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._source = source
        self.on_end = on_end
        self._pumps: dict[str, asyncio.Task[None]] = {}

    def path(self, job_id: str) -> Path:
        return self._directory / f"{job_id}.log"

    def pump(self, job_id: str, submission_id: str) -> None:
        """Copy a running job's log until it ends; does nothing if that is being done."""
        if job_id not in self._pumps or self._pumps[job_id].done():
            self._pumps[job_id] = asyncio.create_task(self._copy(job_id, submission_id), name=f"log-{job_id}")

    async def complete(self, job_id: str, submission_id: str) -> None:
        """Copy the rest of an ended job's log."""
        await self._halt(job_id)
        try:
            whole = await self._source.logs(submission_id)
            self._append_beyond(job_id, 0, whole)
        except SfmError as error:  # the job's end is not held up by its log
            log.warning("job %s: the end of its log is missing: %s", job_id, error)

    async def close(self) -> None:
        for job_id in list(self._pumps):
            await self._halt(job_id)

    async def follow(self, job_id: str, offset: int, ended: Callable[[], Awaitable[bool]]) -> AsyncIterator[bytes]:
        """Bytes of a log from `offset` on, as they are stored, until `ended()` and the file is read to its end."""
        while True:
            last = await ended()  # asked before reading: what was stored before the end is always read
            while part := self.read(job_id, offset):
                offset += len(part)
                yield part
            if last:
                return
            await asyncio.sleep(LOOK_SECONDS)

    def read(self, job_id: str, offset: int, size: int = CHUNK) -> bytes:
        """At most `size` bytes of a log from `offset` on; none if there are none (yet)."""
        try:
            with self.path(job_id).open("rb") as file:
                file.seek(offset)
                return file.read(size)
        except FileNotFoundError:
            return b""

    def errors(self, job_id: str) -> tuple[list[str], str]:
        """The sentences that a driver printed as `error: ...`, each once, and the last line of the log.

        Only the last 256 KiB of the log are looked at.
        """
        size = self._size(job_id)
        text = self.read(job_id, max(0, size - (1 << 18)), 1 << 18).decode(errors="replace")
        lines = [line.strip() for line in _ANSI.sub("", text).splitlines() if line.strip()]
        sentences = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return list(dict.fromkeys(sentences)), lines[-1] if lines else ""

    def _size(self, job_id: str) -> int:
        try:
            return self.path(job_id).stat().st_size
        except FileNotFoundError:
            return 0

    async def _copy(self, job_id: str, submission_id: str) -> None:
        while True:
            seen = 0
            try:
                async for part in self._source.tail(submission_id):
                    seen += self._append_beyond(job_id, seen, part)
                break
            except SfmError as error:
                log.info("job %s: %s; trying again", job_id, error)
                await asyncio.sleep(RETRY_SECONDS)
        self.on_end()

    def _append_beyond(self, job_id: str, position: int, part: str) -> int:
        """Store what of `part`, which begins at byte `position` of the log, is not stored yet; the length of `part`."""
        content = part.encode()
        missing = content[max(0, self._size(job_id) - position) :]
        if missing:
            with self.path(job_id).open("ab") as file:
                file.write(missing)
        return len(content)

    async def _halt(self, job_id: str) -> None:
        if task := self._pumps.pop(job_id, None):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
