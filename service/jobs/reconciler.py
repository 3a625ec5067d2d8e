"""The loop that makes the database and Ray agree, for ever.

The database is the truth. A pass looks at every job that holds room, asks Ray about it and does what
`lifecycle.MEND` says; then it gives room to queued jobs. A job is marked SUBMITTING before it is submitted, and its
name in Ray is known beforehand, so a crash at any instant leaves a state from which the next pass goes on.
Passes never overlap; there is one reconciler per database (the service holds a lock).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from service.cluster.jobs import Cluster, RayJob, Refused, Unreachable
from service.failpoints import failpoint
from service.jobs import lifecycle
from service.jobs.lifecycle import ACTIVE, FINISHED, MEND, Do, Seen, State
from service.jobs.logs import Logs
from service.jobs.scheduler import Capacity, Waiting, schedule
from service.jobs.store import Job, Store
from sfm import plan
from sfm.spec import SfmError, dump_spec

log = logging.getLogger(__name__)


class Reconciler:
    """Runs passes: at once after `wake`, and every `poll_seconds` otherwise."""

    def __init__(self, store: Store, cluster: Cluster, logs: Logs, *, entrypoint: str, poll_seconds: float) -> None:
        self._store = store
        self._cluster = cluster
        self._logs = logs
        self._entrypoint = entrypoint
        self._poll_seconds = poll_seconds
        self._woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.passed_at: float | None = None
        """When the last pass ended (monotonic seconds), whether or not Ray answered."""
        self.trouble: str | None = "Ray is not connected yet"
        """Why Ray could not be asked in the last pass; None if it could."""
        self.capacity: Capacity | None = None
        """What the cluster had when it was last seen."""

    def wake(self) -> None:
        """Ask for a pass now; from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._woken.set)

    async def run(self) -> None:
        """Pass after pass, until cancelled."""
        while True:
            self._woken.clear()
            try:
                if self.trouble is not None:  # at the start, and after Ray was lost: our own head is started again
                    await self._cluster.connect()
                await self.step()
                self.trouble = None
            except SfmError as error:
                if self.trouble != str(error):
                    log.warning("%s", error)
                self.trouble = str(error)
            except Exception:
                log.exception("a pass failed; the next one tries again")
            self.passed_at = time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), self._poll_seconds)

    async def step(self) -> None:
        """One pass.

        Raises:
            Unreachable: Ray does not answer; nothing is concluded about any job.
        """
        self.capacity = await self._cluster.totals()
        active = await asyncio.to_thread(self._store.in_states, ACTIVE)
        await self._mend_all(active)
        admitted = await self._admit(self.capacity)
        await self._mend_all(admitted)

    async def _mend_all(self, jobs: Sequence[Job]) -> None:
        """Mend each job; one that fails holds up no other."""
        results = await asyncio.gather(*map(self._mend, jobs), return_exceptions=True)
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, Unreachable):
                raise result
            if isinstance(result, BaseException):
                log.error("job %s could not be mended; the next pass tries again", job.id, exc_info=result)

    async def _mend(self, job: Job) -> None:
        state = State(job.state)
        ray = await self._cluster.look(job.submission_id)
        if ray.seen in (Seen.PENDING, Seen.RUNNING):
            self._logs.pump(job.id, job.submission_id)
        then = MEND[state][ray.seen]
        if then is Do.SUBMIT:
            await self._submit(job)
        elif then is Do.STOP:
            await self._cluster.stop(job.submission_id)
        elif isinstance(then, State):
            await self._move(job, state, then, ray)

    async def _move(self, job: Job, state: State, to: State, ray: RayJob) -> None:
        if to in FINISHED and ray.seen is not Seen.ABSENT:
            await self._logs.complete(job.id, job.submission_id)
        failpoint(f"reconciler.before_{to.lower()}")
        reason = None
        if to is State.FAILED:
            reason = lifecycle.LOST if ray.seen is Seen.ABSENT else self._why_failed(job, ray)
        elif to is State.CANCELLED:
            reason = lifecycle.CANCELLED_BY_USER if state is State.CANCELLING else lifecycle.STOPPED_OUTSIDE
        await asyncio.to_thread(self._store.move, job.id, state, to, reason)

    def _why_failed(self, job: Job, ray: RayJob) -> str:
        """The driver's own sentences; else the first line of Ray's message and the last of the log."""
        sentences, last_line = self._logs.errors(job.id)
        if sentences:
            return "\n".join(sentences)
        first = ray.message.strip().split("\n")[0].split(", last available logs")[0] or "Ray gives no reason"
        return f"{first[:300]}; the last line of its log: {last_line[:300]}" if last_line else first[:300]

    async def _admit(self, capacity: Capacity) -> list[Job]:
        """Mark the jobs that may start, and tell the others why they wait."""
        queued = {j.id: j for j in await asyncio.to_thread(self._store.in_states, {State.QUEUED})}
        if not queued:
            return []
        specs = {job_id: job.spec for job_id, job in queued.items()}
        running = [plan.request(j.spec) for j in await asyncio.to_thread(self._store.in_states, ACTIVE)]
        waiting = [Waiting(i, s.scheduling.priority, queued[i].number, plan.request(s)) for i, s in specs.items()]
        decision = schedule(waiting, running, capacity)
        for job_id, reason in decision.reasons.items():
            await asyncio.to_thread(self._store.explain, job_id, State.QUEUED, reason)
        admitted = []
        for job_id in decision.admitted:
            if await asyncio.to_thread(self._store.move, job_id, State.QUEUED, State.SUBMITTING):
                queued[job_id].state = State.SUBMITTING
                admitted.append(queued[job_id])
        return admitted

    async def _submit(self, job: Job) -> None:
        failpoint("reconciler.before_submit")
        try:
            await self._cluster.submit(job.submission_id, self._entrypoint, {"job.yaml": dump_spec(job.spec)})
        except Refused as error:
            await asyncio.to_thread(self._store.move, job.id, State.SUBMITTING, State.FAILED, str(error))
        failpoint("reconciler.after_submit")
        self._woken.set()  # see it start as soon as Ray does
