"""The two tables of a job's life."""

from __future__ import annotations

import pytest

from service.jobs.lifecycle import ACTIVE, FINISHED, MEND, TRANSITIONS, Do, Seen, State, table


def test_every_state_has_a_row_and_leads_to_an_end() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {State.SUCCEEDED, State.FAILED, State.CANCELLED} == FINISHED
    for state in State:
        reached, new = set(), {state}
        while new:
            reached |= new
            new = {t for s in new for t in TRANSITIONS[s]} - reached
        assert reached & FINISHED, f"{state} never ends"
        assert state is State.QUEUED or State.QUEUED not in reached - {state}, "no job is queued twice"


def test_whatever_ray_says_there_is_an_answer_and_it_is_a_transition() -> None:
    assert set(MEND) == ACTIVE
    for state, row in MEND.items():
        assert set(row) == set(Seen)
        for seen, then in row.items():
            if isinstance(then, State):
                assert then in TRANSITIONS[state], (state, seen)


def test_only_an_unknown_submission_is_submitted() -> None:
    submits = [(state, seen) for state, row in MEND.items() for seen, then in row.items() if then is Do.SUBMIT]
    assert submits == [(State.SUBMITTING, Seen.ABSENT)]


@pytest.mark.parametrize("seen", [Seen.SUCCEEDED, Seen.FAILED, Seen.STOPPED])
def test_what_ended_in_ray_ends_here(seen: Seen) -> None:
    for state in ACTIVE:
        assert MEND[state][seen] in FINISHED


def test_the_tables_can_be_printed() -> None:
    text = table()
    assert "QUEUED     -> SUBMITTING, CANCELLED" in text
    for name in (*State, *Seen, *Do):
        assert name in text
