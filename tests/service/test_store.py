"""The jobs table: guarded changes, pages, keys."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.jobs.lifecycle import State
from service.jobs.store import Job, KeyTaken, Store, new_id
from sfm.spec import JobSpec, parse_spec
from tests.service.conftest import spec


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"sqlite:///{tmp_path}/jobs.db")


def given(store: Store, key: str | None = None) -> Job:
    return store.create(new_id(), stored_spec(), digest="d", key=key)


def stored_spec() -> JobSpec:
    return parse_spec(spec(output="/runs/x"))


def test_a_stored_job_is_read_back_in_full(store: Store) -> None:
    job = given(store)
    read = store.get(job.id)
    assert read is not None
    assert read.spec == stored_spec()
    assert read.state == State.QUEUED
    assert read.submission_id == f"sfm-{job.id}"
    assert store.get("nothing") is None


def test_of_competing_changes_one_wins(store: Store) -> None:
    job = given(store)
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda _: store.move(job.id, State.QUEUED, State.SUBMITTING), range(16)))
    assert won.count(True) == 1
    assert not store.move(job.id, State.QUEUED, State.CANCELLED, "too late")
    read = store.get(job.id)
    assert read is not None
    assert (read.state, read.reason) == (State.SUBMITTING, None)
    assert read.submitted_at is not None
    assert read.finished_at is None


def test_no_change_outside_the_table(store: Store) -> None:
    with pytest.raises(AssertionError, match="no transition QUEUED -> SUCCEEDED"):
        store.move(given(store).id, State.QUEUED, State.SUCCEEDED)


def test_a_key_belongs_to_one_job(store: Store) -> None:
    first = given(store, key="k")
    with pytest.raises(KeyTaken) as taken:
        given(store, key="k")
    assert taken.value.job.id == first.id
    assert len(store.page(limit=10)) == 1


def test_pages_are_newest_first_and_filtered(store: Store) -> None:
    ids = [given(store).id for _ in range(5)]
    first = store.page(limit=2)
    assert [j.id for j in first] == ids[:2:-1]
    given(store)  # arrives between two pages: shifts nothing
    assert [j.id for j in store.page(limit=9, before=first[-1].number)] == ids[2::-1]
    store.move(ids[0], State.QUEUED, State.CANCELLED)
    assert [j.id for j in store.page(limit=9, states=[State.CANCELLED])] == [ids[0]]


def test_changes_are_announced_after_they_are_stored(tmp_path: Path) -> None:
    seen: list[int] = []
    store = Store(f"sqlite:///{tmp_path}/jobs.db", on_change=lambda: seen.append(len(store.page(limit=10))))
    job = given(store)
    assert store.explain(job.id, State.QUEUED, "no room")
    assert not store.explain(job.id, State.QUEUED, "no room"), "the same sentence is no change"
    assert seen == [1, 1]
