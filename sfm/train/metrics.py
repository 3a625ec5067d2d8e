"""Step metrics, kept with the results: part files that anything can read while the job runs."""

from __future__ import annotations

import json
import time
from typing import Any

from sfm.train.output import Output

_FOLDER = "metrics"


class MetricLog:
    """Collects one record per step and writes them in parts named after their first step. On rank 0.

    Parts come seconds apart: an object store cannot append, and keeps every object.
    """

    def __init__(self, output: Output) -> None:
        self.output, self.interval = output, 1.0 if output.local else 10.0  # seconds
        self.waiting: list[dict[str, Any]] = []
        self.written = time.monotonic()

    def add(self, record: dict[str, Any]) -> None:
        """Take the record of one step."""
        self.waiting.append({**record, "time": time.time()})
        if time.monotonic() - self.written >= self.interval:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self.waiting:
            lines = "".join(json.dumps(record) + "\n" for record in self.waiting)
            self.output.write(f"{_FOLDER}/step-{self.waiting[0]['step']:08d}.jsonl", lines.encode())
            self.waiting = []
        self.written = time.monotonic()


def read_metrics(output: Output) -> list[dict[str, Any]]:
    """All records by step; of a step that was repeated after a resume, the one written last."""
    records: dict[int, dict[str, Any]] = {}
    for name in output.list(_FOLDER):
        for line in (output.read(f"{_FOLDER}/{name}") or b"").splitlines():
            record = json.loads(line)
            if record["step"] not in records or record["time"] >= records[record["step"]]["time"]:
                records[record["step"]] = record
    return [records[step] for step in sorted(records)]
