"""What one GPU does with this model: utilisation, memory, the longest sample, one rank's share of a context-parallel job.

    make bench-gpu GPU_ARGS='--out'     last line: all figures as one JSON object

Preset huge (ViT-H and the decoder of He et al. 2022), bf16, three quarters of patches of 16 x 16 x 16 masked, synthetic
windows made on the device. It takes torch, numpy, pydantic and PyYAML: neither Ray nor zarr nor DeepSpeed.

- rates: a large matrix product, a copy, every attention kernel; random data.
- steps: whole training steps (forward, backward, AdamW). Utilisation (MFU) is the operations that the model asks for
  (`sfm.plan.flops`: no credit for what is computed again) over seconds and the dense bf16 rate of the data sheet, or
  --peak-tflops; `mfu_of_matmul` divides by the measured product instead. Peak memory next to the plan's prediction.
- memory: what the plan predicts for each engine on eight devices; `steps` measures ddp.
- shares: attention of one rank of eight, forward and backward, by the code that trains, next to an eighth of what one
  device takes for all. What ranks would exchange is copied within the device: no network's time is in it.
- largest: the most tokens whose step fits. There attention holds its tensors but leaves its products out, or a try
  would take minutes.
- longest: one step over 1,179,648 tokens, with attention kept and the rest computed again.

Figures are written as they come: a run that is cut short keeps what it has. What would not end before --limit is
left out, and says so; --sections makes several runs of it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from sfm import plan
from sfm.model.blocks import Attend, attend_local
from sfm.model.mae import MaskedAutoencoder
from sfm.model.masking import draw_mask
from sfm.parallel import kernels
from sfm.parallel.compiled import CompileError, compile_blocks
from sfm.parallel.context import Attends, attend_across
from sfm.parallel.mesh import Mesh
from sfm.parallel.plain import PlainEngine
from sfm.plan.machines import GPUS, gpu_of
from sfm.spec import JobSpec, parse_spec
from sfm.train.step import MicroBatch, run_step

RANKS = 8
OUT = "benchmarks/results"

# Steps: patches of the window along each axis, samples, what is switched on.
KEPT: dict[str, bool] = {}
AGAIN = {"checkpoint_activations": True}
PARTLY = {**AGAIN, "keep_attention": True}
AWAY = {**AGAIN, "offload_activations": True}
COMPILED = {"compile_blocks": True}
STEPS = [
    ((16, 16, 16), 8, KEPT),
    ((16, 16, 16), 8, AGAIN),
    ((32, 32, 32), 1, KEPT),
    ((32, 32, 32), 1, AGAIN),
    ((40, 40, 64), 1, KEPT),
    ((40, 40, 64), 1, AGAIN),
    ((40, 40, 64), 1, PARTLY),
    ((40, 40, 64), 1, AWAY),
    ((16, 16, 16), 8, COMPILED),
    ((40, 40, 64), 1, COMPILED),
]
LONGEST = ((96, 96, 128), 1, PARTLY)  # 1,179,648 tokens: 1536 x 1536 x 2048 voxels
SMALL_STEPS = [((4, 4, 4), 2, KEPT), ((4, 4, 4), 2, AGAIN), ((4, 8, 8), 1, AWAY)]
SMALL_LONGEST = ((8, 8, 8), 1, PARTLY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see the code run; no figures to quote")
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 rate of the device; default: its data sheet's")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which nothing is begun")
    parser.add_argument("--out", nargs="?", const=OUT, help=f"folder for DATE-DEVICE.json; default {OUT}")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device: take --device cpu --small to see the code run on this machine")
    bench = Bench(options)
    for section in options.sections:
        bench.tell(f"-- {section}")
        SECTIONS[section](bench)
    bench.found["seconds"] = round(time.monotonic() - bench.began)
    bench.save()
    print(json.dumps(bench.found))


class Bench:
    """The device, what was found on it so far, and the time that is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.began = time.monotonic()
        self.small, self.limit = options.small, options.limit
        self.device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
        self.cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(0) if self.cuda else "CPU"
        known = gpu_of(name)
        sheet = GPUS[known].bf16 if known else None
        self.peak = options.peak_tflops * 1e12 if options.peak_tflops else sheet
        self.found: dict[str, Any] = {
            "label": "tiny sizes: the code runs, the figures mean nothing" if options.small else "preset huge, bf16",
            "device": name,
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version() if self.cuda else None,
            "date": date.today().isoformat(),
            "peak_tflops": self.peak and self.peak / 1e12,
        }
        model = self.spec((4, 4, 4), 1, KEPT).model
        widths = [stack.width // stack.heads for stack in (model.encoder_size, model.decoder_size)]
        self.found["kernel"] = kernels.pin(self.device, torch.bfloat16, widths)
        self.file: Path | None = None
        if options.out:
            parts = [date.today().isoformat(), *name.split(), *(["small"] if self.small else [])]
            parts += [] if len(options.sections) == len(SECTIONS) else options.sections
            self.file = Path(options.out, "-".join(parts) + ".json")
        self.tell(f"{name}, torch {torch.__version__}, attention kernel {self.found['kernel']}")

    @property
    def left(self) -> float:
        """Seconds."""
        return self.limit - (time.monotonic() - self.began)

    def tell(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {line}", flush=True)

    def add(self, section: str, record: dict[str, Any]) -> None:
        """Keep a record, print it and write what there is."""
        self.found.setdefault(section, []).append(record)
        self.tell(f"{section}: " + ", ".join(f"{key} {_short(value)}" for key, value in record.items()))
        self.save()

    def save(self) -> None:
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.found, indent=1) + "\n")

    def spec(self, grid: tuple[int, int, int], samples: int, fields: dict[str, bool], **parallel: Any) -> JobSpec:
        """A job over windows of `grid` patches."""
        edge = 2 if self.small else 16
        size = {"width": 32, "depth": 2, "heads": 4, "mlp": 64}
        sizes = {"preset": "tiny", "encoder": size, "decoder": size} if self.small else {"preset": "huge"}
        return parse_spec(
            {
                "surveys": [{"url": "synthetic"}],
                "window": {"shape": [edge * n for n in grid]},
                "model": {**sizes, "patch": [edge] * 3, **fields},
                "batch": {"size": samples * parallel.get("workers", 1)},
                "parallel": {"engine": "ddp", **parallel},
                "precision": "bf16",
                "resources": {"device": "gpu" if self.cuda else "cpu"},
            }
        )

    def seconds(self, work: Callable[[], Any], repeats: int = 5, warm: bool = True) -> float:
        """Median time of `work`."""
        if warm:
            work()
        times = []
        for _ in range(repeats):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Give back what nothing holds any more, and begin a new high-water mark."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def rates(bench: Bench) -> None:
    """Ceilings: what the device can do at all."""
    n = 256 if bench.small else 8192
    a, b = (torch.randn(n, n, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * n**3 / bench.seconds(lambda: a @ b, 20)
    bench.add("rates", {"what": f"bf16 product of {n} x {n}", "tflops": rate / 1e12})
    x = torch.empty(2**20 if bench.small else 2**32, dtype=torch.uint8, device=bench.device).random_()
    y = torch.empty_like(x)
    bench.add(
        "rates", {"what": "copy, read and written", "gb_s": 2 * x.numel() / bench.seconds(lambda: y.copy_(x)) / 1e9}
    )
    heads, tokens, width = (2, 64, 16) if bench.small else (4, 32_768, 128)
    shape = (1, heads, tokens, width)
    q, k, v, grad = (torch.randn(shape, device=bench.device, dtype=torch.bfloat16) for _ in range(4))
    for name in ("cudnn", "flash") if bench.cuda else ("flash-cpu",):
        kernel = kernels.KERNELS[name]
        try:
            part = kernel.forward(q, k, v)
            forth = bench.seconds(lambda kernel=kernel: kernel.forward(q, k, v))
            back = bench.seconds(lambda kernel=kernel, part=part: kernel.backward(grad, q, k, v, part))
        except RuntimeError as error:
            bench.add("rates", {"what": f"attention {name}", "error": str(error).splitlines()[0]})
            continue
        products = 4 * heads * tokens**2 * width / 1e12
        what = f"attention {name}, {heads} heads of {width}, {tokens} tokens"
        bench.add("rates", {"what": what, "tflops": products / forth, "backward_tflops": 2.5 * products / back})


def memory(bench: Bench) -> None:
    """What the plan predicts for one of eight devices that share the weights' upkeep, by engine."""
    grid = (4, 8, 8) if bench.small else (40, 40, 64)
    for engine in ("ddp", "zero1", "zero2", "zero3", "fsdp2"):
        spec = bench.spec(grid, 1, AGAIN, workers=RANKS, engine=engine)
        found = plan.memory(spec)
        parts = {part: getattr(found, part) / 2**30 for part in ("weights", "gradients", "optimiser", "activations")}
        bench.add("memory", {"engine": engine, "tokens": spec.tokens, **parts, "predicted_gib": found.total / 2**30})


def steps(bench: Bench) -> None:
    """Training steps that take seconds."""
    for grid, samples, fields in SMALL_STEPS if bench.small else STEPS:
        spec = bench.spec(grid, samples, fields)
        if bench.left > 60:
            _record_step(bench, "steps", spec, repeats=3)
        else:
            bench.add("steps", {"tokens": spec.tokens, "switched_on": list(fields), "left_out": "no time was left"})


def longest(bench: Bench) -> None:
    """One step over 1,179,648 tokens, if there is time for it; it is not warmed up."""
    grid, samples, fields = SMALL_LONGEST if bench.small else LONGEST
    spec = bench.spec(grid, samples, fields)
    done = [record["hardware_tflops"] for record in bench.found.get("steps", []) if "seconds" in record]
    needed = plan.flops(spec).hardware / (1e12 * max(done)) if done else 0.0
    if needed > bench.left:
        why = f"needs {needed:.0f} s, {bench.left:.0f} are left: run --sections longest"
        bench.add("longest", {"tokens": spec.tokens, "left_out": why})
        return
    bench.tell(f"longest: {spec.tokens:,} tokens, about {needed:.0f} s")
    _record_step(bench, "longest", spec, repeats=1, warm=False)


def _record_step(bench: Bench, section: str, spec: JobSpec, repeats: int, warm: bool = True) -> None:
    switched = [name for name, on in spec.model.model_dump().items() if on is True]
    record: dict[str, Any] = {"tokens": spec.tokens, "samples": spec.batch.size, "switched_on": switched}
    try:
        seconds, peak = _step(bench, spec, attend_local, repeats, warm)
    except (torch.OutOfMemoryError, CompileError) as error:
        bench.add(section, {**record, "error": str(error).splitlines()[0]})
        return
    operations, predicted = plan.flops(spec), plan.memory(spec).total
    rate = spec.batch.size * operations.model / seconds
    matmul = bench.found.get("rates", [{}])[0].get("tflops")
    record |= {
        "seconds": seconds,
        "tokens_per_s": spec.batch.size * spec.tokens / seconds,
        "tflops": rate / 1e12,
        "hardware_tflops": spec.batch.size * operations.hardware / seconds / 1e12,
        "mfu": bench.peak and rate / bench.peak,
        "mfu_of_matmul": matmul and rate / 1e12 / matmul,
        "peak_gib": peak and peak / 2**30,
        "predicted_gib": predicted / 2**30,
    }
    bench.add(section, record)


def _step(bench: Bench, spec: JobSpec, attend: Attend, repeats: int, warm: bool = True) -> tuple[float, int | None]:
    """Median seconds of a training step, and the bytes at its peak (on a GPU)."""
    bench.forget()
    with bench.device:
        model = MaskedAutoencoder(spec.model, spec.grid)
        torch.nn.init.normal_(model.mask_token, std=0.02)
    if spec.model.compile_blocks:
        compile_blocks(model)
    engine = PlainEngine(model, spec, None)
    voxels = torch.empty(spec.batch.size, *spec.window.shape, device=bench.device).normal_()
    drawn = draw_mask(spec.grid, spec.mask_ratio, 0, 0)
    visible, masked = (torch.from_numpy(t).to(bench.device).expand(spec.batch.size, -1) for t in drawn)
    batch = MicroBatch(voxels, visible, masked)
    attends = Attends(attend, attend, slice(None))
    bench.wait()
    seconds = bench.seconds(lambda: run_step(engine, [batch], 1e-4, spec.model.patch, attends, 0), repeats, warm)
    return seconds, torch.cuda.max_memory_allocated() if bench.cuda else None


def largest(bench: Bench) -> None:
    """The most patch rows along inline, of 96 x 128 patches each, whose step fits, to an eighth."""
    spec = bench.spec(*(SMALL_STEPS[-1] if bench.small else STEPS[5]))
    _, peak = _step(bench, spec, _held, repeats=1)
    bench.add("largest", {"tokens": spec.tokens, "fits": True, "peak_gib": peak and peak / 2**30})  # steps has it, too
    across, rows, most = ((4, 4), 4, 16) if bench.small else ((96, 128), 96, 1536)
    fits, fails = 0, most + 1
    while fails - fits > max(1, fits // 8) and rows <= most and bench.left > 30:
        spec = bench.spec((rows, *across), 1, AGAIN)
        try:
            _, peak = _step(bench, spec, _held, repeats=1, warm=False)
            fits = rows
            bench.add("largest", {"tokens": spec.tokens, "fits": True, "peak_gib": peak and peak / 2**30})
        except torch.OutOfMemoryError:
            fails = rows
            bench.add("largest", {"tokens": spec.tokens, "fits": False})
        rows = 2 * fits if fails > most else (fits + fails) // 2
    if bench.left <= 30:
        bench.add("largest", {"left_out": "no time was left to come closer"})
    bench.forget()


class _Held(torch.autograd.Function):
    """Holds what a fused attention kernel holds, forward and backward, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_zeros(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        q, k, v, *_ = ctx.saved_tensors
        sums = torch.zeros_like(q, dtype=torch.float32)  # kernels add up the queries' gradient in fp32
        return sums.to(q.dtype), torch.zeros_like(k), torch.zeros_like(v)


def _held(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _Held.apply(q, k, v)


def shares(bench: Bench) -> None:
    """Attention of one rank of eight, at the encoder's and at the decoder's length of the longest window."""
    grid = (8, 8, 8) if bench.small else (96, 96, 128)
    spec = bench.spec(grid, 1, KEPT)
    for stack, tokens in (("encoder", spec.visible), ("decoder", spec.tokens)):
        size = spec.model.encoder_size if stack == "encoder" else spec.model.decoder_size
        whole = (1, size.heads, tokens, size.width // size.heads)
        # A quarter of the tokens is a sixteenth of the work.
        quarter = _attention_seconds(bench, attend_local, (*whole[:2], tokens // 4, whole[3]), repeats=1)
        measured = 16 * quarter < bench.left / 4
        alone = 16 * quarter
        if measured:
            alone = _attention_seconds(bench, attend_local, whole, repeats=1, warm=alone < 10)
        head_degree = max(n for n in (1, 2, 4, 8) if size.heads % n == 0)
        modes = {"gather": 1, "ring": 1, "ulysses" if head_degree == RANKS else "hybrid": head_degree}
        for mode, degree in modes.items():
            if mode == "hybrid" and degree == 1:
                continue
            with _alone(degree) as mesh:
                attend = attend_across(mesh, [tokens // RANKS] * RANKS, mode)
                own = (*whole[:2], tokens // RANKS, whole[3])
                seconds = _attention_seconds(bench, attend, own, repeats=1 if alone > 10 else 3)
            record = {"stack": stack, "tokens": tokens, "mode": mode, "ulysses": degree, "seconds": seconds}
            one = {
                "one_device_seconds": alone,
                "one_device": "measured" if measured else "16 x a quarter of the tokens",
            }
            bench.add("shares", {**record, **one, "efficiency": alone / RANKS / seconds})


def _attention_seconds(bench: Bench, attend: Attend, shape: tuple[int, ...], repeats: int, warm: bool = True) -> float:
    """Forward and backward of one attention over random queries, keys and values of this shape."""
    bench.forget()
    q, k, v, grad = (torch.randn(shape, device=bench.device, dtype=torch.bfloat16) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    return bench.seconds(lambda: torch.autograd.grad(attend(*inputs), inputs, grad), repeats, warm)


@contextmanager
def _alone(ulysses: int) -> Iterator[Mesh]:
    """Rank 0 of eight without the others: what would arrive from them is copied from what would be sent."""

    def arrive(received: Tensor, sent: Tensor, *_: Any, **__: Any) -> None:
        flat, source = received.flatten(), sent.flatten()
        for part in flat.split(len(source)):
            part.copy_(source[: len(part)])

    def exchange(operations: list[SimpleNamespace]) -> list[Any]:
        out, into = (next(o.tensor for o in operations if o.op == op) for op in ("send", "receive"))
        into.copy_(out)
        return []

    def operation(op: str, tensor: Tensor, *_: Any) -> SimpleNamespace:
        return SimpleNamespace(op=op, tensor=tensor)

    stands_in = {
        "get_rank": lambda _group=None: 0,
        "get_world_size": lambda group: group,
        "get_global_rank": lambda _group, rank: rank,
        "all_gather_single": arrive,
        "reduce_scatter_single": arrive,
        "all_to_all_single": arrive,
        "isend": "send",
        "irecv": "receive",
        "P2POp": operation,
        "batch_isend_irecv": exchange,
    }
    with patch.multiple(dist, create=True, **stands_in):
        groups: list[Any] = [RANKS, ulysses, RANKS // ulysses]  # a group is known by its size alone
        yield Mesh(RANKS, 0, RANKS, groups[0], ulysses, groups[1], groups[2])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


SECTIONS = {f.__name__: f for f in (rates, memory, steps, shares, largest, longest)}  # cheap first


if __name__ == "__main__":
    main()
