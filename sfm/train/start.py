"""Where a job begins: the committed checkpoints of an output, and what is refused before anything starts. No torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from sfm import plan
from sfm.spec import JobSpec, SfmError
from sfm.survey.preflight import open_all, sampler_of
from sfm.survey.sampler import Cursor, Sampler
from sfm.train.output import Output

FOLDER = "checkpoints"
MANIFEST = "MANIFEST.json"
STATE = "state.json"
_MODEL = "accelerator_type:"  # and the model, as Ray names what a node with such a GPU has


class ClusterError(SfmError):
    """The cluster cannot run the job."""


class CheckpointError(SfmError):
    """A checkpoint is damaged or belongs to another model."""


class Found(NamedTuple):
    """A committed checkpoint."""

    output: Output
    name: str
    """Folder under the output."""
    steps: int
    """Optimiser steps it has behind it."""

    @property
    def place(self) -> str:
        """Where it lies, in words."""
        return f"checkpoint {self.output.url}/{self.name}"

    def read(self, *files: str) -> list[bytes]:
        """Files of it, in the order asked for.

        Raises:
            CheckpointError: one is missing, or differs from its hash.
        """
        try:
            manifest: dict[str, Any] = json.loads(self.output.read(f"{self.name}/{MANIFEST}") or b"{}")
            stated = {file: manifest["files"][file]["sha256"] for file in files}
        except (ValueError, KeyError, TypeError):
            raise self._damaged(MANIFEST) from None
        contents = []
        for file in files:
            content = self.output.read(f"{self.name}/{file}")
            if content is None or hashlib.sha256(content).hexdigest() != stated[file]:
                raise self._damaged(file)
            contents.append(content)
        return contents

    def _damaged(self, file: str) -> CheckpointError:
        return CheckpointError(
            f"{self.place}: {file} is missing or damaged; remove this folder to continue from an older one"
        )


def committed(output: Output) -> list[Found]:
    """Committed checkpoints under `output`, oldest first."""
    found = []
    for name in output.list(FOLDER):
        if name.startswith("step-") and output.read(f"{FOLDER}/{name}/{MANIFEST}") is not None:
            found.append(Found(output, f"{FOLDER}/{name}", int(name.removeprefix("step-"))))
    return found


def find_start(output: Output, spec: JobSpec) -> Found | None:
    """The checkpoint to continue from: the newest of the job itself, else of `checkpoint.start_from`.

    Raises:
        CheckpointError: `start_from` holds no checkpoint, or has nothing left to train.
    """
    own = committed(output)
    if own:
        return own[-1]
    source = spec.checkpoint.start_from
    if source is None:
        return None
    others = committed(Output(source, spec.storage))
    if not others:
        raise CheckpointError(f"checkpoint.start_from {source} holds no committed checkpoint")
    if others[-1].steps >= spec.steps:
        raise CheckpointError(
            f"checkpoint.start_from {source} has {others[-1].steps} steps behind it, and steps {spec.steps} asks for no "
            "more; steps counts from the very beginning"
        )
    return others[-1]


def first_sample(found: Found | None, output: Output, sampler: Sampler) -> int:
    """Number of the first training sample: behind those that `found` consumed.

    0 without one, and for the weights of another job that is over other windows, or does not tell.

    Raises:
        CheckpointError: it is damaged, or too old to tell.
        SurveyError: the job's own windows are not what they were.
    """
    if found is None:
        return 0
    (stored,) = found.read(STATE)
    about, own = json.loads(stored), found.output.url == output.url
    if "cursor" not in about:
        if not own:
            return 0
        raise CheckpointError(
            f"{found.place}: it was written by an earlier version, which kept no cursor; begin a new job"
        )
    cursor = Cursor.from_json(about["cursor"])
    if not own and cursor.plan != sampler.plan:
        return 0
    return sampler.resume(cursor)


def check(spec: JobSpec) -> None:
    """Refuse what can be known to fail: an output that cannot be written, a start that is not there, other windows.

    Raises:
        SfmError: a sentence.
    """
    if spec.output is not None:
        output = Output(spec.output, spec.storage)
        output.write(".write-check", b"")
        output.remove(".write-check")
        if not spec.checkpoint.resume and committed(output):
            raise CheckpointError(
                f"output {spec.output} holds checkpoints of an earlier run and checkpoint.resume is false; "
                "choose another output, or remove that one"
            )
        found = find_start(output, spec)
        if found is not None:
            first_sample(found, output, sampler_of(spec, open_all(spec)))
    elif spec.checkpoint.start_from is not None and not committed(Output(spec.checkpoint.start_from, spec.storage)):
        raise CheckpointError(f"checkpoint.start_from {spec.checkpoint.start_from} holds no committed checkpoint")


def check_cluster(spec: JobSpec, resources: Mapping[str, float]) -> None:
    """Refuse a job that the whole cluster, of `resources` by Ray's names, could not hold.

    How far a cluster grows by itself stands in SFM_MAX_CPUS and SFM_MAX_GPUS of the environment; which models of GPU
    would join is not known, so that none is refused where GPUs may.

    Raises:
        ClusterError: naming what is missing.
    """
    need = plan.request(spec)
    for name, wanted in (("CPU", need.cpus), ("GPU", need.gpus)):
        there = max(resources.get(name, 0), float(os.environ.get(f"SFM_MAX_{name}S", 0)))
        if wanted > there:
            raise ClusterError(
                f"parallel.workers {need.workers} need {wanted:g} {name}s in all, the whole cluster has {there:g}; "
                f"lower parallel.workers or resources, or add nodes"
            )
    model, grows = spec.resources.gpu, float(os.environ.get("SFM_MAX_GPUS", 0)) > 0
    if model is not None and not grows and f"{_MODEL}{model}" not in resources:
        models = ", ".join(sorted(name.removeprefix(_MODEL) for name in resources if name.startswith(_MODEL)))
        raise ClusterError(
            f"resources.gpu {model}: no node of the cluster has such GPUs; there are {models or 'none that Ray knows'}: "
            f"ask for what there is, leave resources.gpu out, or add nodes"
        )
