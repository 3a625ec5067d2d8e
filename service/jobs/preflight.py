"""Checks that a job passes before it is stored: what can be known to fail never waits in a queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from importlib.metadata import entry_points

from sfm.spec import JobSpec, SfmError

log = logging.getLogger(__name__)

SECONDS = 60.0


class PreflightError(SfmError):
    """A survey could not be opened in time."""


async def run(spec: JobSpec) -> None:
    """Run every installed check of entry point group `sfm.preflight` in a thread.

    A check whose package is not installed is skipped: the service also runs without the survey packages.

    Raises:
        SfmError: with the sentence of the first check that fails.
    """
    for check in _checks():
        try:
            await asyncio.wait_for(asyncio.to_thread(check, spec), SECONDS)
        except TimeoutError:
            urls = ", ".join(s.url for s in spec.surveys)
            raise PreflightError(f"surveys: {urls} could not be opened within {SECONDS:.0f} s") from None


def _checks() -> list[Callable[[JobSpec], object]]:
    checks = []
    for entry in sorted(entry_points(group="sfm.preflight"), key=lambda e: e.name):
        try:
            checks.append(entry.load())
        except ModuleNotFoundError as error:
            log.info("preflight check '%s' is skipped: %s is not installed", entry.name, error.name)
    return checks
