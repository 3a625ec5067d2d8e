"""A real service: uvicorn on a free loopback port, SQLite, a Ray head, and a small driver in place of training."""

from __future__ import annotations

import copy
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import uvicorn

from service.app import create_app
from service.cluster.head import Head
from service.settings import Settings

DRIVER = f"python {shlex.quote(str(Path(__file__).with_name('driver.py')))}"
SPEC: dict[str, Any] = {
    "name": "quick",
    "surveys": [{"url": "/surveys/nowhere.mdio"}],
    "window": {"shape": [32, 32, 128]},
    "model": {"preset": "tiny", "patch": [4, 4, 16]},
    "steps": 3,
}
FINISHED = {"SUCCEEDED", "FAILED", "CANCELLED"}

T = TypeVar("T")


def spec(**fields: Any) -> dict[str, Any]:
    return copy.deepcopy(SPEC) | fields


def until(condition: Callable[[], T], what: str, seconds: float = 60) -> T:
    """The first true value of `condition`; fails if there is none in `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"in {seconds} s there was no {what}"
        time.sleep(0.05)
    return value


@contextmanager
def running(settings: Settings) -> Iterator[httpx.Client]:
    """The service in a thread; yields a client of it."""
    server = uvicorn.Server(
        uvicorn.Config(create_app(settings), port=0, log_level="warning", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive(), "started server")
        port = server.servers[0].sockets[0].getsockname()[1]
        headers = {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def api(ray_head: Head, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a service that runs jobs on the session's Ray head, joined by its URL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", ray_head.token_path)
        settings = Settings(
            state_dir=tmp_path_factory.mktemp("state"),
            ray_address=ray_head.address,
            entrypoint=DRIVER,
            preflight=False,
            poll_seconds=0.3,
        )
        with running(settings) as client:
            until(lambda: client.get("/readyz").is_success, "readiness")
            yield client


@pytest.fixture
def lonely(tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of a service whose Ray cluster does not answer."""
    with running(Settings(state_dir=tmp_path, ray_address="http://127.0.0.1:9", preflight=False)) as client:
        yield client


def submit(client: httpx.Client, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    response = client.post("/jobs", json=spec(**fields), headers=headers)
    assert response.status_code == 201, response.text
    job: dict[str, Any] = response.json()
    return job


def reaches(client: httpx.Client, job_id: str, *states: str) -> dict[str, Any]:
    def there() -> dict[str, Any] | None:
        job: dict[str, Any] = client.get(f"/jobs/{job_id}").json()
        assert job["state"] in states or job["state"] not in FINISHED, job
        return job if job["state"] in states else None

    return until(there, f"job in {states}")


def starts(job: dict[str, Any]) -> int:
    """How often a job's driver was started."""
    return len((Path(job["output"]) / "starts.txt").read_text().splitlines())


def assert_problem(response: httpx.Response, status: int, code: str, *words: str) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status
    assert problem["code"] == code
    assert problem["type"] == "about:blank"
    assert problem["title"]
    for word in words:
        assert word in problem["detail"], problem["detail"]
