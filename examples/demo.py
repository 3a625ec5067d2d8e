"""The main job, end to end, on this machine: SEG-Y -> MDIO on S3 -> POST /jobs -> Ray -> a picture.

Starts an S3-protocol server and the control plane on free loopback ports, uses them as a user would
(the command line and HTTP), and stops both at the end. `make demo` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from sfm.survey.devstore import DevStore

SFM = str(Path(sys.executable).with_name("sfm"))
PATCH = (4, 4, 16)  # small patches: a survey of a few hundred lines still holds many windows
RAYS_OWN = ("core_worker.cc", "worker processes have been started")  # remarks on its own actors; `sfm logs` has them
LARGEST_WINDOW = (32, 32, 128)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--survey", help="a SEG-Y file; default: a synthetic survey is generated")
    parser.add_argument("--inline-byte", type=int, default=189)
    parser.add_argument("--crossline-byte", type=int, default=193)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where everything is put; emptied first")
    options = parser.parse_args()
    began = time.monotonic()

    folder = options.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if options.survey:
        segy = Path(options.survey).absolute()
    else:
        segy = folder / "synthetic.sgy"
        run("synth", str(segy))
    with ExitStack() as stack:
        (folder / "s3" / "surveys").mkdir(parents=True)  # a bucket is a folder here
        store = stack.enter_context(DevStore(folder / "s3"))
        os.environ.update(store.environment)
        url = f"s3://surveys/{segy.stem}.mdio"
        lines = ["--inline-byte", str(options.inline_byte), "--crossline-byte", str(options.crossline_byte)]
        run("ingest", str(segy), url, *lines, "--chunks", "64,64,128")
        run("survey", "info", url)
        shape = json.loads(run("survey", "info", url, "--json", show=False))["shape"]

        port = free_port()
        base = f"http://127.0.0.1:{port}"
        serve = subprocess.Popen(
            [SFM, "serve", "--port", str(port), "--state-dir", str(folder / "state"), "--stop-ray-on-exit"]
        )
        stack.callback(stop, serve)
        with httpx.Client(base_url=base, timeout=60) as client:
            wait_until_ready(client, serve)
            job = submit(client, spec_for(url, shape, options.steps))
            page = f"{base}/#/jobs/{job['id']}"
            print(f"\nPOST {base}/jobs -> job {job['id']}; watch it at {page}\n", flush=True)
            with client.stream("GET", f"/jobs/{job['id']}/logs", params={"follow": "true"}, timeout=None) as logs:
                for line in logs.iter_lines():
                    if not any(remark in line for remark in RAYS_OWN):
                        print(line, flush=True)
            job = client.get(f"/jobs/{job['id']}").raise_for_status().json()
            if job["state"] != "SUCCEEDED":
                print(f"error: the job ended as {job['state']}: {job['reason']}", file=sys.stderr)
                return 1
            artifacts = {}
            for name in ("summary.json", "reconstruction.png", "loss.png"):
                artifacts[name] = client.get(f"/jobs/{job['id']}/artifacts/{name}").raise_for_status().content
                (folder / name).write_bytes(artifacts[name])
        report(json.loads(artifacts["summary.json"]), segy.name, shape, folder, page)
        print(f"took      {time.monotonic() - began:.0f} s")
        if sys.stdin.isatty():
            input("The page stays up until you press Enter.")
        else:
            print(
                f"The page is down now; {Path(SFM).relative_to(Path.cwd())} serve --state-dir {folder}/state shows it again."
            )
    return 0


def run(*arguments: str, show: bool = True) -> str:
    """Run `sfm ARGUMENTS`; what it prints is shown, or returned."""
    if show:
        print(f"\n$ sfm {' '.join(arguments)}", flush=True)
    done = subprocess.run([SFM, *arguments], stdout=None if show else subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout or ""


def spec_for(url: str, shape: list[int], steps: int) -> dict[str, Any]:
    """A job small enough for two cores: the largest demo window that leaves room for a held-out block."""
    window = [min(most, size // patch * patch) for most, size, patch in zip(LARGEST_WINDOW, shape, PATCH, strict=True)]
    if all(size < 2 * w for size, w in zip(shape[:2], window[:2], strict=True)):
        longest = 0 if shape[0] >= shape[1] else 1
        window[longest] = shape[longest] // 2 // PATCH[longest] * PATCH[longest]
    return {
        "name": "demo",
        "surveys": [{"url": url}],
        "window": {"shape": window},
        "model": {"preset": "tiny", "patch": list(PATCH), "positions": "rope"},
        "parallel": {"workers": 2, "context": 2, "engine": "zero2"},
        "batch": {"size": 8},
        "optimiser": {"lr": 2e-3, "warmup_steps": 50},
        "steps": steps,
        "checkpoint": {"every": 250},
    }


def submit(client: httpx.Client, spec: dict[str, Any]) -> dict[str, Any]:
    answer = client.post("/jobs", json=spec, headers={"Idempotency-Key": uuid.uuid4().hex})
    if answer.is_error:
        print(f"error: {answer.json().get('detail', answer.text)}", file=sys.stderr)
        raise SystemExit(1)
    return answer.json()


def wait_until_ready(client: httpx.Client, serve: subprocess.Popen[bytes], deadline: float = 120) -> None:
    """Wait for /readyz; seconds until giving up."""
    last = time.monotonic() + deadline
    while serve.poll() is None and time.monotonic() < last:
        try:
            if client.get("/readyz").is_success:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.2)  # between two looks at the condition
    raise SystemExit("error: the control plane did not become ready; its messages stand above")


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def report(summary: dict[str, Any], survey: str, shape: list[int], folder: Path, page: str) -> None:
    model, baseline = summary["held_out_model"], summary["held_out_baseline"]
    print(f"\nsurvey    {survey}: {' x '.join(map(str, shape))} (inline x crossline x sample)")
    print(f"tokens    {summary['tokens_per_sample']:,} per sample")
    print(f"model     {summary['parameters']:,} parameters")
    print(f"loss      {summary['loss_first']:.4f} -> {summary['loss_last']:.4f} in {summary['steps']} steps")
    verdict = f"model {(1 - model / baseline):.0%} lower" if model < baseline else "the model does not beat it"
    print(
        f"held out  error on masked patches: model {model:.4f}, baseline (mean of visible neighbours) {baseline:.4f}: {verdict}"
    )
    print(
        f"speed     {summary['tokens_per_s']:,.0f} tokens/s, {summary['data_wait_share']:.1%} of the time waiting for data"
    )
    print(f"picture   {folder / 'reconstruction.png'}")
    print(f"loss      {folder / 'loss.png'}")
    print(f"page      {page}")


if __name__ == "__main__":
    sys.exit(main())
