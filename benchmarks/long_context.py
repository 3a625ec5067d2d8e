"""One training step of one long sample over a few processes of this machine: does it complete, and in how much memory?

    make bench-long      last line: {"ratio": measured / predicted memory, "tokens": ..., "seconds": ..., ...}

Window 640 x 640 x 1024 in patches of 16 x 16 x 16: 102,400 tokens. Preset tiny; forward, backward, AdamW. Each process is
one context-parallel rank with one thread. Memory is the resident set's high-water mark of the fullest process during the
step, less what it held before there was a window, a model or an optimiser; predicted by `sfm.plan.memory`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sfm import plan
from sfm.model.mae import MaskedAutoencoder
from sfm.model.masking import draw_mask
from sfm.parallel.context import attends
from sfm.parallel.engines import build_engine
from sfm.parallel.mesh import build_mesh
from sfm.plan.shares import slab_rows
from sfm.spec import JobSpec, parse_spec
from sfm.train.step import MicroBatch, run_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--window", type=int, nargs=3, default=[640, 640, 1024])
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--engine", default="ddp")
    parser.add_argument("--recompute", action="store_true", help="compute blocks again in the backward pass")
    parser.add_argument("--heap", action="store_true", help="keep the C library's heap as it is")
    options = parser.parse_args()
    if not options.heap:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # bytes; read when a process starts
    specs = [
        plan.settle(
            parse_spec(
                {
                    "surveys": [{"url": "unused"}],
                    "window": {"shape": shape},
                    "model": {
                        "preset": options.preset,
                        "positions": "rope",
                        "checkpoint_activations": options.recompute,
                    },
                    "parallel": {
                        "workers": options.degree,
                        "context": options.degree,
                        "context_mode": options.mode,
                        "engine": options.engine,
                    },
                    "batch": {"size": 1},
                }
            )
        )
        for shape in ([16 * options.degree, 32, 32], options.window)
    ]
    spec = specs[-1]
    predicted = plan.memory(spec)
    print(f"{spec.tokens:,} tokens over {options.degree} ranks, attention by {spec.parallel.context_mode}", flush=True)
    print(
        f"predicted: {predicted.total / 2**30:.2f} GiB a rank, {plan.flops(spec).hardware / 1e12:.1f} TFLOP", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (specs, folder), nprocs=options.degree)
        ranks = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(options.degree)]
    measured = max(rank["bytes"] for rank in ranks)
    seconds = ranks[0]["seconds"]
    print(f"measured:  {measured / 2**30:.2f} GiB, loss {ranks[0]['loss']:.4f}, {seconds:.0f} s")
    figures = {
        "ratio": round(measured / predicted.total, 3),
        "tokens": spec.tokens,
        "degree": options.degree,
        "mode": spec.parallel.context_mode,
        "measured_bytes": measured,
        "predicted_bytes": predicted.total,
        "seconds": round(seconds, 1),
        "torch": torch.__version__,
    }
    print(json.dumps(figures))


def _rank(rank: int, specs: list[JobSpec], folder: str) -> None:
    torch.set_num_threads(1)
    world = specs[0].parallel.workers
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    small, long = specs
    _step(small)  # what torch and gloo take once
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # begin a new high-water mark
    began = time.perf_counter()
    loss = _step(long)
    figures = {"bytes": _status("VmHWM") - before, "seconds": time.perf_counter() - began, "loss": loss}
    Path(folder, str(rank)).write_text(json.dumps(figures))
    dist.destroy_process_group()


def _step(spec: JobSpec) -> float:
    """One optimiser step on this rank's slab of a made-up window; the loss."""
    mesh = build_mesh(spec.parallel.context, spec.parallel.ulysses)
    rows = slab_rows(spec.grid[0], mesh.context, mesh.context_rank)
    engine = build_engine(MaskedAutoencoder.from_spec(spec), spec)
    generator = torch.Generator().manual_seed(mesh.rank)
    voxels = torch.randn(1, len(rows) * spec.model.patch[0], *spec.window.shape[1:], generator=generator)
    visible, masked = (torch.from_numpy(part)[None] for part in draw_mask(spec.grid, spec.mask_ratio, 0, 0, rows))
    batch = MicroBatch(voxels, visible, masked)
    return run_step(engine, [batch], 1e-4, spec.model.patch, attends(mesh, spec), rows.start).loss


def _status(field: str) -> int:
    """Bytes that the kernel states for this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel states no {field}")


if __name__ == "__main__":
    main()
