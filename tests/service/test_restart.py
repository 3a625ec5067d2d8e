"""`sfm serve` killed at the worst instants and started again: no job is lost, none is started twice."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from service.cluster import head
from service.jobs.lifecycle import LOST
from tests.service.conftest import DRIVER, reaches, spec, starts, submit, until

SFM = [sys.executable, "-c", "from sfm.cli import main; main()"]


class Service:
    """`sfm serve` in a process of its own."""

    def __init__(self, state_dir: Path, port: int = 0, failpoint: str = "") -> None:
        self.state_dir = state_dir
        env = os.environ | {
            "SFM_ENTRYPOINT": DRIVER,
            "SFM_PREFLIGHT": "false",
            "SFM_POLL_SECONDS": "0.3",
            "SFM_RAY_NUM_CPUS": "2",
            "SFM_FAILPOINT": failpoint,
        }
        command = [*SFM, "serve", "--state-dir", str(state_dir), "--port", str(port)]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("sfm is ready: http://127.0.0.1:"), line
        self.url = line.split()[-1]
        self.port = int(self.url.rsplit(":", 1)[1])
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.client.close()
        self.process.send_signal(how)
        return self.process.wait(30)


@contextmanager
def serving(state_dir: Path, port: int = 0, failpoint: str = "") -> Iterator[Service]:
    service = Service(state_dir, port, failpoint)
    try:
        yield service
    finally:
        if service.process.poll() is None:
            service.end(signal.SIGKILL)


@pytest.fixture
def state_dir(ray_head: head.Head, tmp_path: Path) -> Path:
    """A state directory whose Ray head is the session's."""
    shutil.copy(Path(ray_head.token_path).with_name("ray.json"), tmp_path)
    assert head.find(tmp_path) == ray_head
    return tmp_path


@pytest.mark.parametrize(
    "instant",
    ["api.stored", "reconciler.before_submit", "reconciler.after_submit", "reconciler.before_succeeded"],
)
def test_killed_at(instant: str, state_dir: Path) -> None:
    key = {"Idempotency-Key": "once"}
    with serving(state_dir, failpoint=instant) as service:
        try:
            service.client.post("/jobs", json=spec(), headers=key)
        except httpx.TransportError:
            assert instant == "api.stored"
        assert service.process.wait(60) == -signal.SIGKILL
    with serving(state_dir) as service:
        again = service.client.post("/jobs", json=spec(), headers=key)
        assert again.status_code == 200, "the job was stored before the kill"
        job = reaches(service.client, again.json()["id"], "SUCCEEDED")
        assert [j["id"] for j in service.client.get("/jobs").json()["jobs"]] == [job["id"]]
        assert starts(job) == 1
        assert service.client.get(f"/jobs/{job['id']}/logs").text.count("done\n") == 1
        assert service.end() == 0


def test_killed_while_a_job_runs_and_is_followed(state_dir: Path, tmp_path: Path) -> None:
    job_file = tmp_path / "job.yaml"
    job_file.write_text(yaml.safe_dump(spec(name="waits")))
    with serving(state_dir) as service:
        command = [*SFM, "submit", str(job_file), "--follow"]
        follower = subprocess.Popen(
            command, env=os.environ | {"SFM_URL": service.url}, stdout=subprocess.PIPE, text=True
        )
        assert follower.stdout is not None
        job_id = follower.stdout.readline().strip()
        job = reaches(service.client, job_id, "RUNNING")
        until(lambda: "before 99\n" in service.client.get(f"/jobs/{job_id}/logs").text, "the log")
        service.end(signal.SIGKILL)
    (Path(job["output"]) / "go").touch()
    with serving(state_dir, port=service.port) as service:
        job = reaches(service.client, job_id, "SUCCEEDED")
        assert starts(job) == 1
        stored = service.client.get(f"/jobs/{job_id}/logs").text
        followed = follower.stdout.read()
        assert follower.wait(30) == 0
    assert followed == stored
    expected = [f"{word} {number}" for word in ("before", "after") for number in range(100)]
    assert [line for line in stored.splitlines() if line.startswith(("before", "after"))] == expected


def test_a_cluster_of_its_own_outlives_the_service_and_its_loss_is_told(tmp_path: Path) -> None:
    try:
        with serving(tmp_path) as service:
            first = head.find(tmp_path)
            assert first is not None
            assert Path(first.token_path).stat().st_mode & 0o777 == 0o600
            assert httpx.get(f"{first.address}/api/jobs/").status_code == 401, "Ray asks for its token"
            job_id = submit(service.client, name="waits")["id"]
            reaches(service.client, job_id, "RUNNING")
            until(lambda: "before 99\n" in service.client.get(f"/jobs/{job_id}/logs").text, "the log")
            assert service.end() == 0
        assert head.find(tmp_path) == first, "the head outlives the service"
        with serving(tmp_path) as service:
            assert head.find(tmp_path) == first, "and is joined again"
            assert reaches(service.client, job_id, "RUNNING")
            head.stop(tmp_path)
            job = reaches(service.client, job_id, "FAILED")
            assert job["reason"] == LOST
            second = head.find(tmp_path)
            assert second is not None
            assert second != first, "a new head was started"
            assert "before 99\n" in service.client.get(f"/jobs/{job_id}/logs").text, "its log is still there"
            assert service.end() == 0
        stop = subprocess.run(
            [*SFM, "serve", "--stop-ray", "--state-dir", str(tmp_path)], capture_output=True, text=True, check=True
        )
        assert stop.stdout == "Ray was stopped\n"
        assert not second.alive
        assert not Path(second.temp_dir).exists()
    finally:
        head.stop(tmp_path)


def test_serve_refuses_in_a_sentence(state_dir: Path) -> None:
    def refused(*options: str, **env: str) -> str:
        done = subprocess.run(
            [*SFM, "serve", *options], capture_output=True, text=True, env=os.environ | env, timeout=60
        )
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
        return done.stderr

    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        assert f"port {port}: Address already in use" in refused("--port", port, "--state-dir", str(state_dir))
    assert "set SFM_TOKEN" in refused("--host", "0.0.0.0", SFM_TOKEN="")
    with serving(state_dir):
        assert "another 'sfm serve' uses" in refused("--port", "0", "--state-dir", str(state_dir))
