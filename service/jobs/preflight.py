"""Checks that a job passes before it is stored: what can be known to fail never waits in a queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from service.settings import absolute_url
from sfm.spec import JobSpec, SfmError

log = logging.getLogger(__name__)

SECONDS = 60.0


class PreflightError(SfmError):
    """A survey could not be opened in time."""


def absolute(spec: JobSpec, base: Path) -> JobSpec:
    """`spec` with its relative local paths made absolute against `base`: a job runs in a directory of its own."""
    surveys = tuple(s.model_copy(update={"url": absolute_url(s.url, base)}) for s in spec.surveys)
    checkpoint = spec.checkpoint
    if checkpoint.start_from is not None:
        checkpoint = checkpoint.model_copy(update={"start_from": absolute_url(checkpoint.start_from, base)})
    output = spec.output and absolute_url(spec.output, base)
    return spec.model_copy(update={"surveys": surveys, "checkpoint": checkpoint, "output": output})


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
