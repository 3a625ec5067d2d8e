"""Jobs in the database: the truth about every job. One transaction per change.

Every change of state is one guarded statement (`update ... where state = expected`): of two that
compete, one wins and the other learns that it lost. SQLite by default, PostgreSQL by URL.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, Text, create_engine, event, make_url, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from service.jobs.lifecycle import TRANSITIONS, State
from sfm.spec import JobSpec, parse_spec


class Base(DeclarativeBase):
    pass


class Job(Base):
    """One job. Times are seconds since 1970-01-01 UTC."""

    __tablename__ = "jobs"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    """Order of arrival."""
    id: Mapped[str] = mapped_column(unique=True)
    name: Mapped[str]
    spec_json: Mapped[str] = mapped_column(Text)
    """The spec in full, its output decided."""
    output: Mapped[str]
    state: Mapped[str] = mapped_column(index=True)
    reason: Mapped[str | None] = mapped_column(Text)
    """Why it waits, failed or was cancelled."""
    created_at: Mapped[float]
    submitted_at: Mapped[float | None]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    idempotency_key: Mapped[str | None] = mapped_column(unique=True)
    digest: Mapped[str]
    """Hash of the spec as it was sent: tells a repeated request from another one with the same key."""

    @property
    def spec(self) -> JobSpec:
        return parse_spec(json.loads(self.spec_json))

    @property
    def submission_id(self) -> str:
        """Name of this job in Ray: known before it is submitted, so that a lost answer loses nothing."""
        return f"sfm-{self.id}"


STAMPS = {
    State.SUBMITTING: "submitted_at",
    State.RUNNING: "started_at",
    State.SUCCEEDED: "finished_at",
    State.FAILED: "finished_at",
    State.CANCELLED: "finished_at",
}


def new_id() -> str:
    """A job's id: 12 hexadecimal digits."""
    return secrets.token_hex(6)


class Store:
    """The jobs table. All methods block; call them from threads."""

    def __init__(self, database_url: str, on_change: Callable[[], None] = lambda: None) -> None:
        """Open the database and create what is missing; `on_change` is called after every commit that changes a job."""
        self.on_change = on_change
        self._engine = _engine(database_url)
        Base.metadata.create_all(self._engine)

    def create(self, job_id: str, spec: JobSpec, *, digest: str, key: str | None = None) -> Job:
        """Store a new job, whose `spec.output` is decided.

        Raises:
            KeyTaken: a job with idempotency key `key` exists already.
        """
        assert spec.output is not None
        job = Job(
            id=job_id,
            name=spec.name,
            spec_json=spec.model_dump_json(),
            output=spec.output,
            state=State.QUEUED,
            created_at=time.time(),
            idempotency_key=key,
            digest=digest,
        )
        try:
            with Session(self._engine, expire_on_commit=False) as session, session.begin():
                session.add(job)
        except IntegrityError:
            if key is not None and (existing := self.by_key(key)):
                raise KeyTaken(existing) from None
            raise
        self.on_change()
        return job

    def get(self, job_id: str) -> Job | None:
        return self._one(Job.id == job_id)

    def by_key(self, key: str) -> Job | None:
        return self._one(Job.idempotency_key == key)

    def page(self, *, limit: int, before: int | None = None, states: Collection[State] = ()) -> Sequence[Job]:
        """At most `limit` jobs, newest first, that arrived before number `before`."""
        query = select(Job).order_by(Job.number.desc()).limit(limit)
        if before is not None:
            query = query.where(Job.number < before)
        if states:
            query = query.where(Job.state.in_(states))
        with Session(self._engine, expire_on_commit=False) as session:
            return session.scalars(query).all()

    def in_states(self, states: Collection[State]) -> Sequence[Job]:
        """All jobs in `states`, oldest first."""
        with Session(self._engine, expire_on_commit=False) as session:
            return session.scalars(select(Job).where(Job.state.in_(states)).order_by(Job.number)).all()

    def move(self, job_id: str, expected: State, to: State, reason: str | None = None) -> bool:
        """Change a job's state if it still is `expected`; whether it was."""
        assert to in TRANSITIONS[expected], f"no transition {expected} -> {to}"
        values: dict[str, Any] = {"state": to, "reason": reason}
        if to in STAMPS:
            values[STAMPS[to]] = time.time()
        return self._update(job_id, expected, values)

    def explain(self, job_id: str, expected: State, reason: str | None) -> bool:
        """Say why a job waits, if it still is `expected` and the sentence is new."""
        return self._update(job_id, expected, {"reason": reason}, Job.reason.is_distinct_from(reason))

    def ping(self) -> None:
        """Raise if the database does not answer."""
        with self._engine.connect() as connection:
            connection.execute(text("select 1"))

    def close(self) -> None:
        self._engine.dispose()

    def _one(self, condition: Any) -> Job | None:
        with Session(self._engine, expire_on_commit=False) as session:
            return session.scalars(select(Job).where(condition)).one_or_none()

    def _update(self, job_id: str, expected: State, values: dict[str, Any], *conditions: Any) -> bool:
        statement = update(Job).where(Job.id == job_id, Job.state == expected, *conditions).values(**values)
        with self._engine.begin() as connection:
            changed = connection.execute(statement).rowcount == 1
        if changed:
            self.on_change()
        return changed


class KeyTaken(Exception):
    """An idempotency key is in use by `job`."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.id)
        self.job = job


def _engine(database_url: str) -> Engine:
    url = make_url(database_url)
    engine = create_engine(url, pool_pre_ping=url.get_backend_name() != "sqlite")
    if url.get_backend_name() == "sqlite":
        if url.database:
            Path(url.database).parent.mkdir(parents=True, exist_ok=True)

        @event.listens_for(engine, "connect")
        def _pragmas(connection: Any, _record: Any) -> None:
            cursor = connection.cursor()
            cursor.execute("pragma busy_timeout = 30000")  # milliseconds
            cursor.execute("pragma journal_mode = wal")
            cursor.execute("pragma synchronous = full")  # a job that was accepted survives a power cut
            cursor.execute("pragma foreign_keys = on")
            cursor.close()

    return engine
