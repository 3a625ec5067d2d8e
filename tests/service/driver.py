"""A stand-in for the training driver: does what its job's name says, in well under a second, without torch."""

import json
import pathlib
import sys
import time

import yaml

spec = yaml.safe_load(pathlib.Path("job.yaml").read_text())
out = pathlib.Path(spec["output"])
(out / "metrics").mkdir(parents=True, exist_ok=True)
with (out / "starts.txt").open("a") as file:
    file.write("started\n")  # one line per start: proves that a job ran once


def train(first: int, last: int, part: str) -> None:
    with (out / "metrics" / f"{part}.jsonl").open("a") as file:
        for step in range(first, last):
            record = {"step": step, "loss": 1 / (step + 1), "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 100.0}
            file.write(json.dumps(record | {"data_wait_share": 0.0, "step_seconds": 0.1, "time": time.time()}) + "\n")


def wait_for(name: str) -> None:
    while not (out / name).exists():
        time.sleep(0.02)


match spec["name"]:
    case "quick":
        train(0, spec["steps"], "0000")
        (out / "summary.json").write_text('{"steps": 3}')
        (out / "reconstruction.png").write_bytes(b"\x89PNG picture")
        print("done")
    case "chatty":
        for number in range(3000):
            print(f"line {number} ünïcode")
        print("error: none of this is lost", file=sys.stderr)
    case "waits":
        for number in range(100):
            print(f"before {number}")
        train(0, 2, "0000")
        wait_for("go")
        for number in range(100):
            print(f"after {number}")
    case "fails":
        print("error: survey nowhere.mdio, chunk 3: no such object", file=sys.stderr)
        sys.exit(1)
    case "crashes":
        print("last words")
        sys.exit(3)
