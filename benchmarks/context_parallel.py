"""Does splitting one sample over processes pay? One training step (forward, backward) of the same sample and mask:
one single-threaded process against `--degree` single-threaded processes that share its tokens, in every mode,
interleaved in one run. And what the machine itself allows: the same processes taking the whole step side by side,
each on its own, with nothing to share or to wait for. Where that takes longer than one process alone (cores that share
caches, memory or clock), no way of sharing the work can reach an efficiency of 1.

    make bench-cp        last line: {"efficiency": t1 / (degree x t_degree) of the best mode, "modes": ...,
                                     "machine": t1 / t of the processes side by side, ...}, medians over rounds
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sfm.model.mae import MaskedAutoencoder
from sfm.model.masking import draw_mask
from sfm.parallel.context import attends
from sfm.parallel.mesh import Mesh, build_mesh
from sfm.plan.shares import slab_rows
from sfm.spec import ContextMode, JobSpec, parse_spec

MODES: tuple[ContextMode, ...] = ("gather", "ring", "ulysses")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--grid", type=int, nargs=3, default=[16, 24, 24], help="patches of the window")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    spec = parse_spec(
        {
            "surveys": [{"url": "unused"}],
            "window": {"shape": [8 * n for n in options.grid]},
            "model": {
                "preset": "tiny",
                "patch": [8, 8, 8],
                "positions": "rope",
                "encoder": {"width": 192, "depth": 4, "heads": 4, "mlp": 768},
                "decoder": {"width": 96, "depth": 2, "heads": 4, "mlp": 384},
            },
            "parallel": {"workers": options.degree, "context": options.degree},
            "batch": {"size": 1},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (spec, options.rounds, folder), nprocs=options.degree)
        with open(f"{folder}/times") as file:
            seconds = json.load(file)
    alone = seconds["alone"]
    # Ratios within a round, where the machine is the same for both, then the median.
    ratio = {name: statistics.median(a / t for a, t in zip(alone, many, strict=True)) for name, many in seconds.items()}
    modes = {mode: round(ratio[mode] / options.degree, 3) for mode in MODES}
    one = statistics.median(alone)
    print(
        f"{spec.tokens} tokens; one process: {one:.2f} s a step; side by side: {ratio['side by side']:.3f} of its speed"
    )
    for mode in MODES:
        print(f"{mode:8} {options.degree} processes: {ratio[mode]:.2f} times as fast, efficiency {modes[mode]}")
    best = max(modes, key=lambda name: modes[name])
    figures = {"efficiency": modes[best], "mode": best, "modes": modes, "tokens": spec.tokens, "degree": options.degree}
    figures |= {"machine": round(ratio["side by side"], 3), "load": round(os.getloadavg()[0], 2)}
    print(json.dumps({**figures, "seconds_one_process": round(one, 3), "torch": torch.__version__}))


def _rank(rank: int, spec: JobSpec, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(spec.parallel.workers))
    store = dist.FileStore(f"{folder}/store", spec.parallel.workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=spec.parallel.workers)
    whole, mesh = build_mesh(1), build_mesh(spec.parallel.context)
    model = MaskedAutoencoder.from_spec(spec)
    generator = torch.Generator().manual_seed(0)
    window = torch.randn(1, *spec.window.shape, generator=generator)
    seconds: dict[str, list[float]] = {"alone": [], "side by side": [], **{mode: [] for mode in MODES}}
    for number in range(rounds + 1):
        for name, times in seconds.items():
            dist.barrier()
            began = time.perf_counter()
            if name in MODES:
                _step(model, spec, window, mesh, name)
            elif name == "side by side" or rank == 0:
                _step(model, spec, window, whole, "gather")
            dist.barrier()  # where those without work wait, asleep
            if number:  # the first round warms up
                times.append(time.perf_counter() - began)
    if rank == 0:
        with open(f"{folder}/times", "w") as file:
            json.dump(seconds, file)
    dist.destroy_process_group()


def _step(model: MaskedAutoencoder, spec: JobSpec, window: torch.Tensor, mesh: Mesh, mode: ContextMode) -> None:
    """One forward and backward pass over this rank's slab."""
    rows = slab_rows(spec.grid[0], mesh.context, mesh.context_rank)
    thickness = spec.model.patch[0]
    slab = window[:, rows.start * thickness : rows.stop * thickness]
    visible, masked = (torch.from_numpy(t)[None] for t in draw_mask(spec.grid, spec.mask_ratio, 0, 0, rows))
    parallel = spec.parallel.model_copy(update={"context": mesh.context, "context_mode": mode})
    attend = attends(mesh, spec.model_copy(update={"parallel": parallel}))
    loss = model(
        slab, visible, masked, first_row=rows.start, attend_encoder=attend.encoder, attend_decoder=attend.decoder
    )
    loss.backward()
    model.zero_grad()


if __name__ == "__main__":
    main()
