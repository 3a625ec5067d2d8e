"""The whole line, nothing mocked: SEG-Y, MDIO on the S3 protocol, HTTP, Ray Data, Ray Train, DeepSpeed, checkpoints.

The doors and the layouts of one job must agree: through `POST /jobs` or `ray job submit`, on one worker or
two, read by Ray Data or directly, interrupted or not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from sfm.spec import Storage
from sfm.survey.devstore import DevStore
from sfm.train.metrics import read_metrics
from sfm.train.output import Output

BIN = Path(sys.executable).parent
STEPS = 6


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """An S3-protocol server with a synthetic survey in it, ingested by the command line."""
    folder = tmp_path_factory.mktemp("store")
    for bucket in ("surveys", "results"):
        (folder / "s3" / bucket).mkdir(parents=True)
    with DevStore(folder / "s3") as running:
        environment = os.environ | running.environment
        segy = str(folder / "made.sgy")
        sfm(environment, "synth", segy, "--size", "40,72,96", "--seed", "3")
        sfm(environment, "ingest", segy, "s3://surveys/made.mdio", "--chunks", "32,32,96")
        yield running


@pytest.fixture(scope="module")
def environment(store, ray_head):
    """What a job's driver and workers need: where the store is, where Ray is."""
    return store.environment | ray_head.environment


def sfm(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run([BIN / "sfm", *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def job(**fields: Any) -> dict[str, Any]:
    return {
        "name": "end-to-end",
        "surveys": [{"url": "s3://surveys/made.mdio"}],
        "window": {"shape": [16, 16, 32]},
        "model": {
            "preset": "tiny",
            "patch": [4, 4, 8],
            "encoder": {"width": 48, "depth": 2, "heads": 3, "mlp": 96},
            "decoder": {"width": 48, "depth": 1, "heads": 3, "mlp": 96},
            "positions": "rope",
        },
        "parallel": {"workers": 2, "context": 2, "engine": "zero2"},
        "batch": {"size": 4, "micro": 2},
        "steps": STEPS,
        "checkpoint": {"every": 4},
        **fields,
    }


def ray_job_submit(environment: dict[str, str], folder: Path, spec: dict[str, Any], *, code: int = 0) -> str:
    """`ray job submit -- python -m sfm.train --config job.yaml`; returns what it printed."""
    folder.mkdir()
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    # Workers inherit the head's environment, which another test may have started without this store.
    aws = {name: value for name, value in environment.items() if name.startswith("AWS_")}
    runtime = json.dumps({"env_vars": aws})
    train = f"{sys.executable} -m sfm.train --config job.yaml"
    command = [
        BIN / "ray",
        "job",
        "submit",
        "--working-dir",
        folder,
        "--runtime-env-json",
        runtime,
        "--",
        *train.split(),
    ]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def losses(url: str) -> list[float]:
    records = read_metrics(Output(url, Storage()))
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def chunks_asked_for(url: str) -> float:
    """By all ranks together."""
    return sum(r["read_cache_hits"] + r["read_cache_misses"] for r in read_metrics(Output(url, Storage())))


def start_service(state: Path) -> tuple[subprocess.Popen[str], str]:
    """`sfm serve` with results on S3, and its address."""
    serve = subprocess.Popen(
        [BIN / "sfm", "serve", "--port=0", "--state-dir", state, "--output=s3://results", "--stop-ray-on-exit"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert serve.stdout is not None
    ready = next(line for line in serve.stdout if "sfm is ready" in line)
    return serve, ready.split()[-1]


@pytest.fixture(scope="module")
def plain(environment, tmp_path_factory):
    """Output of the job on one worker, read directly, through `ray job submit`: the plainest way."""
    folder = tmp_path_factory.mktemp("reference")
    output = str(folder / "out")
    spec = job(parallel={"workers": 1, "engine": "ddp"}, batch={"size": 4}, feed="direct", output=output)
    ray_job_submit(environment, folder / "job", spec)
    return output


@pytest.fixture(scope="module")
def reference(plain):
    """Its losses."""
    return losses(plain)


def test_post_jobs_trains_and_shows(store, reference, tmp_path, monkeypatch):
    """Through `POST /jobs`, two context-parallel workers, ZeRO-2, Ray Data; results on S3. The service is killed meanwhile."""
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    serve, url = start_service(tmp_path)
    try:
        with httpx.Client(base_url=url, timeout=60) as client:
            wrong = client.post("/jobs", json=job(surveys=[{"url": "s3://surveys/none.mdio"}]))
            assert (wrong.status_code, "no survey at s3://surveys/none.mdio" in wrong.json()["detail"]) == (422, True)
            large = client.post("/jobs", json=job(window={"shape": [16, 16, 128]}))
            assert large.status_code == 422
            assert "window.shape" in large.json()["detail"]

            made = client.post("/jobs", json=job()).raise_for_status().json()
            deadline = time.monotonic() + 60
            while client.get(f"/jobs/{made['id']}").json()["state"] != "RUNNING":
                assert time.monotonic() < deadline
                time.sleep(0.1)
        serve.kill()  # the job goes on
        serve.wait()
        serve, url = start_service(tmp_path)
        with httpx.Client(base_url=url, timeout=60) as client:
            assert [found["id"] for found in client.get("/jobs").json()["jobs"]] == [made["id"]]
            with client.stream("GET", f"/jobs/{made['id']}/logs", params={"follow": "true"}, timeout=300) as log:
                text = "".join(log.iter_text())
            done = client.get(f"/jobs/{made['id']}").json()
            assert done["state"] == "SUCCEEDED", text[-4000:]
            assert text.count(f"step {STEPS}/{STEPS}") == 1

            metrics = client.get(f"/jobs/{made['id']}/metrics").json()
            records = metrics if isinstance(metrics, list) else metrics["metrics"]
            assert [record["step"] for record in records] == list(range(1, STEPS + 1))
            np.testing.assert_allclose([record["loss"] for record in records], reference, rtol=1e-5)

            summary = client.get(f"/jobs/{made['id']}/artifacts/summary.json").json()
            assert summary["held_out_windows"] > 0
            assert summary["mask_ratio"] == 0.75
            for name in ("reconstruction.png", "loss.png"):
                picture = client.get(f"/jobs/{made['id']}/artifacts/{name}").content
                assert picture.startswith(b"\x89PNG")
        written = Path(store.root, "results", made["id"], "checkpoints")
        assert sorted(p.name for p in written.iterdir()) == ["step-00000004", "step-00000006"]
    finally:
        serve.terminate()
        serve.wait(timeout=60)


def test_data_parallel_by_ray_job_submit_equals_one_worker(environment, plain, reference, tmp_path):
    output = str(tmp_path / "out")
    two = job(parallel={"workers": 2, "engine": "zero2"}, batch={"size": 4, "micro": 1}, output=output)
    printed = ray_job_submit(environment, tmp_path / "job", two)
    assert printed.count("attention: mode local, kernel flash-cpu") == 1
    np.testing.assert_allclose(losses(output), reference, rtol=1e-5)
    assert chunks_asked_for(output) == chunks_asked_for(plain) > 0


def test_a_job_cut_in_two_takes_the_same_steps(environment, reference, tmp_path):
    """Its driver is killed after a checkpoint; the same job continues, with other workers, to the same losses."""
    output = str(tmp_path / "out")
    first = tmp_path / "first"
    first.mkdir()
    long = job(steps=STEPS, checkpoint={"every": 2}, output=output)
    (first / "job.yaml").write_text(yaml.safe_dump(long))
    alone = {name: value for name, value in (os.environ | environment).items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "sfm.train", "--config", "job.yaml"]
    process = subprocess.Popen(command, cwd=first, env=alone, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    manifest = Path(output, "checkpoints", "step-00000002", "MANIFEST.json")
    deadline = time.monotonic() + 200
    while not manifest.exists():
        assert process.poll() is None, "ended before the first checkpoint"
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.01)
    process.kill()
    process.wait()

    rest = job(parallel={"workers": 1, "engine": "ddp"}, batch={"size": 4}, checkpoint={"every": 2}, output=output)
    printed = ray_job_submit(environment, tmp_path / "job", rest)
    assert "continuing after step" in printed
    np.testing.assert_allclose(losses(output), reference, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"surveys": [{"url": "s3://surveys/none.mdio"}]}, "no survey at s3://surveys/none.mdio"),
        ({"window": {"shape": [16, 160, 32]}}, "window.shape"),
        ({"parallel": {"workers": 64, "context": 1}, "batch": {"size": 64}}, "parallel.workers 64"),
    ],
)
def test_a_bad_job_ends_with_a_sentence_before_any_worker_starts(environment, tmp_path, fields, words):
    printed = ray_job_submit(environment, tmp_path / "job", job(output=str(tmp_path / "out"), **fields), code=1)
    error = next(line for line in printed.splitlines() if line.startswith("error: "))
    assert words in error
    assert "Traceback" not in printed
    assert "RayTrainWorker" not in printed
