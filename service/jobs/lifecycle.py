"""The life of a job, as two tables. Pure: no database, no Ray.

`TRANSITIONS` says which changes of state exist. `MEND` says what to do for each pair of
(what is stored, what Ray says): it is how the reconciler makes the two agree after any crash.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """What the database says about a job."""

    QUEUED = "QUEUED"  # accepted, waits for room
    SUBMITTING = "SUBMITTING"  # room was given to it; Ray may or may not know it yet
    RUNNING = "RUNNING"
    CANCELLING = "CANCELLING"  # a user wants it ended; Ray may still run it
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


TRANSITIONS: dict[State, tuple[State, ...]] = {
    State.QUEUED: (State.SUBMITTING, State.CANCELLED),
    State.SUBMITTING: (State.RUNNING, State.CANCELLING, State.SUCCEEDED, State.FAILED, State.CANCELLED),
    State.RUNNING: (State.CANCELLING, State.SUCCEEDED, State.FAILED, State.CANCELLED),
    State.CANCELLING: (State.SUCCEEDED, State.CANCELLED),
    State.SUCCEEDED: (),
    State.FAILED: (),
    State.CANCELLED: (),
}
FINISHED = frozenset(state for state, following in TRANSITIONS.items() if not following)
ACTIVE = frozenset({State.SUBMITTING, State.RUNNING, State.CANCELLING})
"""States in which a job holds room on the cluster."""


class Seen(StrEnum):
    """What Ray says about a submission."""

    ABSENT = "ABSENT"
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


class Do(StrEnum):
    """What the reconciler does when no change of state is due."""

    WAIT = "wait"
    SUBMIT = "submit"
    STOP = "stop"


MEND: dict[State, dict[Seen, State | Do]] = {
    State.SUBMITTING: {
        Seen.ABSENT: Do.SUBMIT,
        Seen.PENDING: Do.WAIT,
        Seen.RUNNING: State.RUNNING,
        Seen.SUCCEEDED: State.SUCCEEDED,
        Seen.FAILED: State.FAILED,
        Seen.STOPPED: State.CANCELLED,
    },
    State.RUNNING: {
        Seen.ABSENT: State.FAILED,  # the cluster that ran it is gone
        Seen.PENDING: Do.WAIT,
        Seen.RUNNING: Do.WAIT,
        Seen.SUCCEEDED: State.SUCCEEDED,
        Seen.FAILED: State.FAILED,
        Seen.STOPPED: State.CANCELLED,  # `ray job stop`, past us
    },
    State.CANCELLING: {
        Seen.ABSENT: State.CANCELLED,
        Seen.PENDING: Do.STOP,
        Seen.RUNNING: Do.STOP,
        Seen.SUCCEEDED: State.SUCCEEDED,  # it was faster
        Seen.FAILED: State.CANCELLED,
        Seen.STOPPED: State.CANCELLED,
    },
}

LOST = (
    "the Ray cluster that ran this job was restarted or lost, and the job with it; "
    "submit the same spec with this job's output to continue from its newest checkpoint"
)
STOPPED_OUTSIDE = "stopped on the Ray cluster, not through this service"
CANCELLED_BY_USER = "cancelled by request"


def table() -> str:
    """Both tables as text."""
    width = max(map(len, State))
    lines = [f"{s:<{width}} -> {', '.join(TRANSITIONS[s]) or '(the end)'}" for s in State]
    lines += ["", "stored".ljust(width) + "  Ray says".ljust(12) + "  so"]
    lines += [f"{s:<{width}}  {seen:<10}  {then}" for s, row in MEND.items() for seen, then in row.items()]
    return "\n".join(lines)
