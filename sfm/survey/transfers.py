"""Requests on their way and chunks being decoded: the threads, limits and memory that the readers of a process share."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from sfm.survey.cache import DiskCache
from sfm.survey.clients import SurveyError, check_process
from sfm.survey.failures import is_final, is_throttling, persist
from sfm.survey.meter import Meter
from sfm.survey.objects import Bytes, DamagedError, Objects
from sfm.survey.pacing import Backoff, Concurrency


class ClosedError(SurveyError):
    """The threads have ended."""

    def __init__(self) -> None:
        super().__init__("this reader was closed; make another one")


class Transfers:
    """Fetches with as many requests in flight as pay, again where one fails, and decodes in threads of its own.

    Attributes:
        closed: whether no more is taken on.

    Args:
        memory: bytes that chunks on their way may take; one is always let through.
        decoders: threads that decode.
        most: requests in flight at most.
        disk: keeps what was fetched, as stored.
        fixed: keep `most` requests in flight, whatever that brings.
    """

    def __init__(
        self,
        memory: int = 128 * 2**20,
        decoders: int = 2,
        most: int = 128,
        disk: DiskCache | None = None,
        backoff: Backoff | None = None,
        *,
        fixed: bool = False,
    ) -> None:
        self.meter = Meter()
        self.disk = disk
        self.memory = memory
        self._backoff = backoff or Backoff()
        self._pace = Concurrency(most, most, most) if fixed else Concurrency(least=min(4, most), most=most)
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="fetch")
        self.decoders = ThreadPoolExecutor(decoders, thread_name_prefix="decode")
        self._lock = threading.Lock()  # guards the pace and what follows
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running = self._starting = 0  # threads that make requests, and that are about to
        self.closed = False
        self._room = threading.Condition()
        self._taken = 0
        self._process = os.getpid()
        self._rooms = threading.local()

    def check_process(self) -> None:
        """Refuse to work in a child that was forked after this was made: its threads stayed behind.

        Raises:
            SurveyError: it was.
        """
        check_process(self._process, "this reader was made")

    def room(self, size: int) -> np.ndarray:
        """A buffer of the calling thread's own, uint8, at least `size`; what it held is lost."""
        room: np.ndarray | None = getattr(self._rooms, "bytes", None)
        if room is None or room.nbytes < size:
            room = self._rooms.bytes = np.empty(size, np.uint8)
        return room

    def take(self, size: int) -> None:
        """Wait until `size` more bytes may be on their way."""
        with self._room:
            self._room.wait_for(lambda: self._taken == 0 or self._taken + size <= self.memory)
            self._taken += size

    def give(self, size: int) -> None:
        """Give back what :meth:`take` took."""
        with self._room:
            self._taken -= size
            self._room.notify_all()

    def fetch(
        self,
        objects: Objects,
        key: str,
        start: int = 0,
        stop: int | None = None,
        keep_as: str | None = None,
        anew: bool = False,
    ) -> Future[Bytes | None]:
        """Bytes of an object, asked for again while that may help; None where there is none.

        The future raises what the store threw last.

        Args:
            keep_as: the survey under whose name the disk cache keeps them, if there is one.
            anew: whether what that holds is to be replaced.

        Raises:
            ClosedError: the threads have ended.
            RuntimeError: no thread can be had.
        """
        future: Future[Bytes | None] = Future()

        def job() -> Bytes | None:
            return self._recall(keep_as, objects, key, start, stop, anew)

        with self._lock:
            if self.closed:
                raise ClosedError()
            self._waiting.append((future, job))
            if self._running + self._starting >= self._pace.limit:
                self.meter.add(queued=1)
            elif not self._start():
                self._waiting.pop()
                raise RuntimeError("no thread can be started to fetch it; check the limits on threads and processes")
        return future

    def close(self) -> None:
        """Cancel requests that wait for their turn, and end the threads once what they began is done."""
        with self._lock:
            self.closed = True
            waiting, self._waiting = list(self._waiting), deque()
        for future, _ in waiting:
            future.cancel()
        self._threads.shutdown()
        self.decoders.shutdown()

    def _start(self) -> bool:
        """Have one more thread make requests; whether any does. The lock is held."""
        try:
            self._threads.submit(self._work)
        except RuntimeError:  # none can be had: those there take what waits, one after the other
            return self._running + self._starting > 0
        self._starting += 1
        return True

    def _work(self) -> None:
        with self._lock:
            self._running += 1
            self._starting = max(
                0, self._starting - 1
            )  # a thread that failed to start may have left its work to another
        while True:
            with self._lock:
                if not self._waiting or self._running > self._pace.limit:
                    self._running -= 1
                    if not self._running:
                        self._pace.rest()
                    return
                future, job = self._waiting.popleft()
                if len(self._waiting) > self._starting and self._running + self._starting < self._pace.limit:
                    self._start()  # the limit was raised
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
                    future.set_exception(error)

    def _recall(
        self, survey: str | None, objects: Objects, key: str, start: int, stop: int | None, anew: bool
    ) -> Bytes | None:
        """From the disk, if it lies there."""
        if self.disk is None or survey is None:
            return self._persist(objects, key, start, stop)
        name = f"{key} {start} {stop}"
        kept = None if anew else self.disk.get(survey, name)
        if kept is not None:
            self.meter.add(disk_hits=1)
            return kept
        data = self._persist(objects, key, start, stop)
        if data is not None:
            self.disk.put(survey, name, data)
        return data

    def _persist(self, objects: Objects, key: str, start: int, stop: int | None) -> Bytes | None:
        return persist(
            lambda: self._ask(objects, key, start, stop),
            self._backoff,
            lambda error: self.closed or is_final(error),
            lambda: self.meter.add(retries=1),
        )

    def _ask(self, objects: Objects, key: str, start: int, stop: int | None) -> Bytes | None:
        began = time.monotonic()
        try:
            data = objects.get(key, start, stop)
            if data is not None and stop is not None and start >= 0 and len(data) > stop - start:
                raise DamagedError(f"object {key}: asked for {stop - start} bytes, got {len(data)}")
        except Exception as error:
            self._note(began, 0, throttled=is_throttling(error))
            raise
        self._note(began, len(data) if data is not None else 0)
        return data

    def _note(self, began: float, size: int, *, throttled: bool = False) -> None:
        now = time.monotonic()
        self.meter.add(requests=1, bytes_fetched=size, fetch_seconds=now - began)
        with self._lock:
            full = bool(self._waiting)
            self._pace.done(now, size, full=full, throttled=throttled, took=now - began)
