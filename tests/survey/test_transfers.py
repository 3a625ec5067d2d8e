"""Requests are made again where that helps and never where it does not; the memory on its way is bounded."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError

from sfm.survey.clients import status
from sfm.survey.failures import is_final, is_throttling
from sfm.survey.objects import DamagedError
from sfm.survey.pacing import Backoff
from sfm.survey.transfers import ClosedError, Transfers
from tests.survey.conftest import few_threads

HASTY = Backoff(first=0.0001, attempts=5)


class Scripted:
    """Objects that answer what they were told, one after the other."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked = 0

    def get(self, *_: object) -> bytes | None:
        self.asked += 1
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def any(self) -> bool:
        return True


THROTTLED = GenericError("Server returned non-2xx status code: 503 Service Unavailable: SlowDown")
CUT = GenericError("HTTP error: error decoding response body")


@pytest.fixture
def transfers():
    made = Transfers(backoff=HASTY)
    yield made
    made.close()


def test_asks_again_until_it_comes(transfers: Transfers) -> None:
    objects = Scripted(THROTTLED, CUT, TimeoutError("slow"), DamagedError("sum"), b"abc")
    assert transfers.fetch(objects, "k").result(10) == b"abc"
    seen = transfers.meter.now()
    assert (seen.requests, seen.retries, seen.bytes_fetched) == (5, 4, 3)


def test_gives_up_with_the_last_error(transfers: Transfers) -> None:
    objects = Scripted(*[CUT] * 9)
    with pytest.raises(GenericError, match="decoding response body"):
        transfers.fetch(objects, "k").result(10)
    assert objects.asked == 5


@pytest.mark.parametrize("error", [PermissionDeniedError("403"), PermissionError("mode"), NotADirectoryError("x")])
def test_what_is_refused_is_not_asked_again(transfers: Transfers, error: Exception) -> None:
    objects = Scripted(error, b"never")
    with pytest.raises(type(error)):
        transfers.fetch(objects, "k").result(10)
    assert objects.asked == 1


def test_what_is_not_there_is_not_asked_again(transfers: Transfers) -> None:
    objects = Scripted(None, b"never")
    assert transfers.fetch(objects, "k").result(10) is None


def test_reads_the_status_of_both_clients() -> None:
    boto = OSError("throttled")
    boto.__cause__ = Exception()
    boto.__cause__.response = {"ResponseMetadata": {"HTTPStatusCode": 429}}  # type: ignore[attr-defined]
    assert (status(boto), status(THROTTLED), status(CUT)) == (429, 503, None)
    assert is_throttling(boto)
    assert is_throttling(THROTTLED)
    assert not is_throttling(CUT)
    assert is_final(GenericError("status code: 403 Forbidden"))
    assert not is_final(THROTTLED)


class Slow:
    """Objects that come when `gate` opens, and count how many are asked for at a time."""

    def __init__(self) -> None:
        self.gate, self.lock = threading.Event(), threading.Lock()
        self.now = self.most = 0
        self.reached = threading.Condition(self.lock)

    def get(self, *_: object) -> bytes | None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.reached.notify_all()
        self.gate.wait(20)
        with self.lock:
            self.now -= 1
        return b"x"

    def any(self) -> bool:
        return True


def test_no_more_in_flight_than_allowed() -> None:
    transfers, objects = Transfers(most=6), Slow()
    futures = [transfers.fetch(objects, str(n)) for n in range(40)]
    with objects.lock:
        assert objects.reached.wait_for(lambda: objects.now == 6, 10)
    objects.gate.set()
    assert [future.result(10) for future in futures] == [b"x"] * 40
    assert objects.most == 6
    assert transfers.meter.now().queued == 34
    transfers.close()


def test_memory_on_its_way_is_bounded_and_a_chunk_larger_than_it_passes() -> None:
    transfers = Transfers(memory=100)
    transfers.take(1000)  # alone
    taken: list[int] = []
    with ThreadPoolExecutor(4) as threads:
        waiting = {threads.submit(lambda n=n: (transfers.take(60), taken.append(n))) for n in range(3)}
        assert not wait(waiting, timeout=0.2).done  # none may
        transfers.give(1000)
        for _ in range(3):
            done, waiting = wait(waiting, timeout=10, return_when=FIRST_COMPLETED)
            assert (len(done), len(taken)) == (1, 3 - len(waiting))  # two would be 120
            transfers.give(60)
    transfers.close()


def test_closing_cancels_what_waits() -> None:
    transfers, objects = Transfers(most=4), Slow()
    futures = [transfers.fetch(objects, str(n)) for n in range(20)]
    with objects.lock:
        assert objects.reached.wait_for(lambda: objects.now == 4, 10)
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(transfers.close)
        for future in futures[4:]:
            with pytest.raises(CancelledError):
                future.result(10)
        objects.gate.set()
        closing.result(10)
    assert [future.result() for future in futures[:4]] == [b"x"] * 4
    with pytest.raises(ClosedError):
        transfers.fetch(objects, "more")


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_requests_wait_for_the_threads_that_can_be_had(threads: int) -> None:
    transfers, objects = Transfers(most=6), Slow()
    objects.gate.set()
    with few_threads(threads, "fetch"):
        if threads:
            futures = [transfers.fetch(objects, str(n)) for n in range(40)]
            assert [future.result(10) for future in futures] == [b"x"] * 40
            assert objects.most <= threads
        else:
            with pytest.raises(RuntimeError, match="no thread can be started to fetch it"):
                transfers.fetch(objects, "1")
    assert [transfers.fetch(objects, str(n)).result(10) for n in range(10)] == [b"x"] * 10
    transfers.close()
