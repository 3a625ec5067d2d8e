"""What does a training step cost, next to the 3D masked autoencoder that others would take from a package?

Ours against MONAI's `MaskedAutoEncoderViT`, on a CPU, in fp32, in one run: encoder 384 wide x 6 blocks, decoder
192 x 4, 6 heads each, feed-forward 4 x, windows of 128 x 128 x 128 voxels, patches of 16 x 16 x 16, batch 2, three
quarters of the patches masked. A step draws the mask, runs forward, loss, backward and AdamW. Equal for both: sizes
(query, key and value biases included), sine-cosine positions, share of visible tokens and the loss, the mean squared
error over the voxels of masked patches. MONAI's model stands as published: it embeds all patches, then drops the masked
ones; adds a class token; and predicts every patch, also the visible ones, which its loss then leaves out.

Three ways to train theirs: as one would (a convolution embeds, AdamW as PyTorch has it by default); with the fused
AdamW that our engines choose on CPUs, so that models alone are compared; and with that and `proj_type="perceptron"`,
where a linear layer embeds, the quickest way we found.

    make bench-mae       last line: {"speedup": their seconds / ours, "memory_ratio": our peak / theirs, ...}, both
                         against the first way; the others are in "speedups" and "memory_ratios"

Times are medians over rounds in which the contenders take turns, ratios are taken within a round. Memory is measured in
a process for each contender: the high-water mark of its resident set over a few steps, less what was resident before
the first one (code, weights and data). What is left are gradients, the optimiser's moments, activations and scratch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import monai
import numpy as np
import torch
import torch.multiprocessing as mp
from einops.layers.torch import Rearrange
from monai.networks.nets import MaskedAutoEncoderViT
from torch import Tensor

from sfm.model.mae import MaskedAutoencoder, masked_live
from sfm.model.masking import draw_mask
from sfm.parallel.engines import adamw
from sfm.spec import Optimiser, parse_spec

WINDOW, PATCH, BATCH, RATIO = 128, 16, 2, 0.75
ENCODER = {"width": 384, "depth": 6, "heads": 6, "mlp": 1536}
DECODER = {"width": 192, "depth": 4, "heads": 6, "mlp": 768}
OURS, THEIRS = "ours", "monai"

Step = Callable[[], float]
"""Takes one optimiser step and returns its loss."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seconds = times(options.rounds)
    with mp.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # a new process for each
        peaks = {name: pool.apply(peak_bytes, (name, options.threads)) for name in CONTENDERS}
    rivals = [name for name in CONTENDERS if name != OURS]
    speedups = {name: _median(t / o for t, o in zip(seconds[name], seconds[OURS], strict=True)) for name in rivals}
    for name, many in seconds.items():
        print(f"{name:40} {_median(many):.3f} s a step ({min(many):.3f} at best), {peaks[name] / 2**20:.0f} MiB")
    figures = {
        "speedup": speedups[THEIRS],
        "memory_ratio": round(peaks[OURS] / peaks[THEIRS], 3),
        "speedups": speedups,
        "memory_ratios": {name: round(peaks[OURS] / peaks[name], 3) for name in rivals},
        "seconds": {name: _median(many) for name, many in seconds.items()},
        "peak_mib": {name: round(peak / 2**20) for name, peak in peaks.items()},
        "rounds": options.rounds,
        "threads": options.threads,
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "monai": monai.__version__,
    }
    print(json.dumps(figures))


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def times(rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each contender in each round; the first three warm up and do not count."""
    steps = {name: make() for name, make in CONTENDERS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-3, rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def peak_bytes(name: str, threads: int) -> int:
    """Run in a process of its own: how far its resident set rises over three steps."""
    torch.set_num_threads(threads)
    step = CONTENDERS[name]()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts again from here
    before = resident("VmRSS")
    for _ in range(3):
        step()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """A size in bytes that Linux keeps about this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory is measured on Linux alone")


def windows() -> Tensor:
    """[B, I, X, T] amplitudes, all live."""
    return torch.randn(BATCH, WINDOW, WINDOW, WINDOW, generator=torch.Generator().manual_seed(0))


def ours() -> Step:
    spec = parse_spec(
        {
            "surveys": [{"url": "unused"}],
            "window": {"shape": [WINDOW] * 3},
            "model": {"patch": [PATCH] * 3, "encoder": ENCODER, "decoder": DECODER},
            "mask": {"ratio": RATIO},
        }
    )
    model, voxels, drawn = MaskedAutoencoder.from_spec(spec), windows(), 0
    optimiser = adamw(model, Optimiser())

    def step() -> float:
        nonlocal drawn
        masks = [draw_mask(spec.grid, RATIO, 0, drawn + sample) for sample in range(BATCH)]
        drawn += BATCH
        visible, masked = (torch.from_numpy(np.stack(part)) for part in zip(*masks, strict=True))
        loss = model(voxels, visible, masked) / masked_live(voxels, masked, spec.model.patch)
        return _update(loss, optimiser)

    return step


def theirs(projection: str = "conv", *, fused: bool = True) -> Step:
    model = MaskedAutoEncoderViT(
        in_channels=1,
        img_size=WINDOW,
        patch_size=PATCH,
        hidden_size=ENCODER["width"],
        mlp_dim=ENCODER["mlp"],
        num_layers=ENCODER["depth"],
        num_heads=ENCODER["heads"],
        masking_ratio=RATIO,
        decoder_hidden_size=DECODER["width"],
        decoder_mlp_dim=DECODER["mlp"],
        decoder_num_layers=DECODER["depth"],
        decoder_num_heads=DECODER["heads"],
        proj_type=projection,
        qkv_bias=True,
    )
    voxels = windows()
    options = Optimiser()
    optimiser = torch.optim.AdamW(
        model.parameters(), options.lr, options.betas, options.eps, options.weight_decay, fused=fused or None
    )
    to_patches = Rearrange("b (i p) (x q) (t r) -> b (i x t) (p q r)", p=PATCH, q=PATCH, r=PATCH)

    def step() -> float:
        prediction, mask = model(voxels[:, None])  # [B, N, P], [B, N] with 1 where masked
        error = (prediction - to_patches(voxels)).square().mean(-1)  # [B, N]
        return _update((error * mask).sum() / mask.sum(), optimiser)

    return step


def _update(loss: Tensor, optimiser: torch.optim.Optimizer) -> float:
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    return loss.item()


CONTENDERS: dict[str, Callable[[], Step]] = {
    OURS: ours,
    THEIRS: lambda: theirs(fused=False),
    f"{THEIRS}, fused AdamW": theirs,
    f"{THEIRS}, fused AdamW, linear embedding": lambda: theirs("perceptron"),
}


if __name__ == "__main__":
    main()
