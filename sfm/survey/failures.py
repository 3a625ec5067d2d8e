"""What the failure of a request means, whichever client it came from, and trying again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from sfm.survey.clients import PASSING, SurveyError, status
from sfm.survey.objects import DamagedError
from sfm.survey.pacing import Backoff
from sfm.survey.plain import BrokenBodyError

Found = TypeVar("Found")


def persist(
    attempt: Callable[[], Found],
    backoff: Backoff,
    hopeless: Callable[[Exception], bool],
    again: Callable[[], None] | None = None,
) -> Found:
    """What `attempt` returns, made again while that may help.

    Args:
        hopeless: whether another attempt would fail with the same exception.
        again: called before each further attempt.

    Raises:
        Exception: what the last attempt threw.
    """
    began, number = time.monotonic(), 1
    while True:
        try:
            return attempt()
        except Exception as error:
            pause = None if hopeless(error) else backoff.pause(number, time.monotonic() - began, random.random())
            if pause is None:
                raise
        time.sleep(pause)
        number += 1
        if again is not None:
            again()


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and everything it came from."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


def is_final(error: BaseException) -> bool:
    """Whether the same request would fail again: what is refused stays refused."""
    from obstore import exceptions as rust

    refused = (PermissionError, rust.PermissionDeniedError, rust.UnauthenticatedError, rust.NotSupportedError)
    if isinstance(error, (*refused, rust.InvalidPathError, IsADirectoryError, NotADirectoryError)):
        return True
    if isinstance(error, SurveyError):
        return not isinstance(error, DamagedError)
    return status(error) in (400, 401, 403, 405, 416)


def is_passing(error: BaseException) -> bool:
    """Whether a store that can be reached refused for a moment, or broke off."""
    from aiohttp import ClientPayloadError
    from obstore.exceptions import GenericError

    return any(
        status(cause) in PASSING
        or isinstance(cause, (ClientPayloadError, BrokenBodyError))
        or (isinstance(cause, GenericError) and "response body error" in str(cause))
        for cause in chain(error)
    )


def is_throttling(error: BaseException) -> bool:
    """Whether the store asks for fewer requests."""
    return status(error) in (429, 503)
