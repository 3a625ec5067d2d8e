"""Checkpoints: safetensors and JSON, hashed, committed by a manifest that is written last.

    checkpoints/step-00000500/weights.safetensors      fp32, one tensor per parameter
                              exp_avg.safetensors      AdamW's moments, likewise
                              exp_avg_sq.safetensors
                              state.json               steps taken, the sampler's cursor behind the last consumed, the spec
                              MANIFEST.json            SHA-256 and size of the others

They name parameters, not ranks: any engine at any number of workers reads what any other wrote. A folder
without a manifest was never finished and is ignored. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json

import safetensors.torch

from sfm.parallel.engines import MOMENTS, Resume, State
from sfm.spec import JobSpec
from sfm.survey.sampler import Cursor
from sfm.train.output import Output
from sfm.train.start import FOLDER, MANIFEST, STATE, CheckpointError, Found, committed


def save(output: Output, state: State, steps: int, cursor: Cursor, spec: JobSpec) -> None:
    """Write and commit a checkpoint after `steps` steps; then remove all but the newest `checkpoint.keep`. On rank 0."""
    folder = f"{FOLDER}/step-{steps:08d}"
    about = {"steps": steps, "cursor": cursor.to_json(), "spec": json.loads(spec.model_dump_json())}
    files = {f"{part}.safetensors": safetensors.torch.save(tensors) for part, tensors in state.items()}
    files[STATE] = json.dumps(about).encode()
    manifest = {}
    for name, content in files.items():
        output.write(f"{folder}/{name}", content)
        manifest[name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    output.write(f"{folder}/{MANIFEST}", json.dumps({"files": manifest}, indent=1).encode())
    for old in committed(output)[: -spec.checkpoint.keep]:
        output.remove(old.name)


def load(found: Found, shapes: dict[str, tuple[int, ...]]) -> Resume:
    """Read and verify a checkpoint.

    Args:
        shapes: what each parameter of the model must look like.

    Raises:
        CheckpointError: a file is missing or differs from its hash, or a tensor does not fit the model.
    """
    parts = "weights", *MOMENTS
    about, *stored = found.read(STATE, *(f"{part}.safetensors" for part in parts))
    state = {part: safetensors.torch.load(content) for part, content in zip(parts, stored, strict=True)}
    for part, tensors in state.items():
        different = sorted(
            name
            for name in tensors.keys() | shapes.keys()
            if name not in tensors or tuple(tensors[name].shape) != shapes.get(name)
        )
        if different:
            raise CheckpointError(
                f"{found.place}: {part} of {different[0]} does not fit the model; was it written with other sizes?"
            )
    return Resume(state, json.loads(about)["steps"])
