"""Metrics and artifacts, from local directories and from S3."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.jobs.outputs import Output
from sfm.spec import Storage
from tests.service.conftest import until


def lines(*records: tuple[int, float]) -> str:
    return "".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in records)


def test_later_parts_win_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    parts = tmp_path / "metrics"
    parts.mkdir()
    (parts / "0001.jsonl").write_text(lines((2, 20.0), (3, 30.0), (4, float("nan"))) + '{"step": 5, "lo')
    (parts / "0000.jsonl").write_text(lines((0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)))
    (parts / "notes.txt").write_text("no metrics")
    output = Output(str(tmp_path), Storage())
    assert [(r["step"], r["loss"]) for r in output.metrics()] == [(0, 0.0), (1, 1.0), (2, 20.0), (3, 30.0), (4, None)]
    assert [r["step"] for r in output.metrics(after_step=3)] == [4]


def test_nothing_written_yet(tmp_path: Path) -> None:
    output = Output(str(tmp_path / "not there"), Storage())
    assert output.metrics() == []
    assert output.artifact("summary.json") is None


@pytest.mark.parametrize("name", ["../secret", "metrics/0000.jsonl", "", "summary.json/../../secret"])
def test_only_known_names_are_artifacts(tmp_path: Path, name: str) -> None:
    with pytest.raises(KeyError):
        Output(str(tmp_path), Storage()).artifact(name)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A real S3 server over a directory: the directory of bucket `models`, and the server's URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    key, secret = "k" * 20, "s" * 40
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    (tmp_path / "models").mkdir()
    rclone = Path(sys.executable).with_name("rclone")
    options = ["--addr", address, "--auth-key", f"{key},{secret}", "--config", str(tmp_path / "none")]
    server = subprocess.Popen([rclone, "serve", "s3", *options, "--dir-cache-time", "0", tmp_path])
    try:
        until(lambda: _listens(address), "S3 server")
        yield tmp_path / "models", f"http://{address}"
    finally:
        server.terminate()
        server.wait()


def _listens(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_s3(bucket: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    directory, endpoint = bucket
    parts = directory / "run" / "metrics"
    parts.mkdir(parents=True)
    (parts / "0000.jsonl").write_text(lines((0, 1.0)))
    output = Output("s3://models/run", Storage(endpoint_url=endpoint, region="us-east-1"))
    assert output.metrics() == [{"step": 0, "loss": 1.0}]
    (parts / "0001.jsonl").write_text(lines((0, 2.0), (1, 3.0)))
    (directory / "run" / "summary.json").write_text("{}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    by_environment = Output("s3://models/run", Storage())
    assert by_environment.metrics() == [{"step": 0, "loss": 2.0}, {"step": 1, "loss": 3.0}], "listings are not kept"
    assert by_environment.artifact("summary.json") == b"{}"
    assert by_environment.artifact("loss.png") is None
