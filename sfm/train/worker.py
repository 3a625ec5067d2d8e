"""What each Ray Train worker runs: the loop over steps."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
import warnings
from collections.abc import Generator
from typing import Any

import numpy as np
import ray.train
import ray.train.torch
import torch

from sfm import plan
from sfm.feed.direct import batches_ahead, direct_feed
from sfm.feed.order import RankOrder
from sfm.feed.ray_data import ray_feed
from sfm.feed.source import Columns, SampleSource
from sfm.model.mae import MaskedAutoencoder
from sfm.parallel import kernels
from sfm.parallel.compiled import compile_blocks
from sfm.parallel.context import attends
from sfm.parallel.engines import build_engine
from sfm.parallel.mesh import Mesh, build_mesh
from sfm.plan.shares import slab_rows
from sfm.spec import JobSpec, SfmError
from sfm.survey.mdio import Survey
from sfm.survey.meter import Reading
from sfm.train import checkpoint
from sfm.train.evaluate import HeldOut, Section, evaluate
from sfm.train.metrics import MetricLog, read_metrics
from sfm.train.output import Output
from sfm.train.peak import Peak, peak
from sfm.train.pictures import loss_png, section_png
from sfm.train.schedule import learning_rate
from sfm.train.start import find_start, first_sample
from sfm.train.step import MicroBatch, of_every_rank, run_step


class TrainingError(SfmError):
    """Training cannot go on."""


def train(config: dict[str, Any]) -> None:
    """Train on this worker's device until the last step, evaluate, and leave the results.

    Args:
        config: "spec" (as JSON) and "statistics" of each survey.
    """
    spec = JobSpec.model_validate(config["spec"])
    if spec.output is None:
        raise TrainingError("the driver hands every worker an output; this spec has none")
    for chatty in ("", "ray.data", "DeepSpeed"):  # "" is the root, to which parts of Ray Train talk
        logging.getLogger(chatty).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed calls old names
    # Arrays from the object store are read-only; nothing here writes to them.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    device = _device(spec)
    mesh = build_mesh(spec.parallel.context, spec.parallel.ulysses)
    output = Output(spec.output, spec.storage)
    rows = slab_rows(spec.grid[0], mesh.context, mesh.context_rank)
    model = MaskedAutoencoder.from_spec(spec)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = find_start(output, spec)
    resume = checkpoint.load(found, shapes) if found else None
    first = resume.steps if resume else 0
    if mesh.rank == 0 and found:
        print(f"continuing after step {first} from {found.output.url}/{found.name}", flush=True)
    kernel = _prepare(model.to(device), spec, device)
    if mesh.rank == 0:
        mode = spec.parallel.context_mode if spec.parallel.context > 1 else "local"
        print(f"attention: mode {mode}, kernel {kernel}", flush=True)
    engine = build_engine(model, spec, resume)
    del resume  # the weights are in the engine
    attend = attends(mesh, spec)
    source = SampleSource(spec, config["statistics"], rows)
    sample = first_sample(found, output, source.sampler)
    batches = _feed(spec, source, mesh, config["statistics"], spec.steps - first, sample)
    log = MetricLog(output) if mesh.rank == 0 else None
    told = 0.0
    rate = peak(device, torch.bfloat16 if spec.precision == "bf16" else torch.float32)
    # of all devices, if they did nothing but the products the model asks for
    shortest_step = spec.batch.size * plan.flops(spec).model / (spec.parallel.workers * rate.flops)

    with contextlib.closing(source), contextlib.closing(batches):
        for step in range(first, spec.steps):
            began = time.perf_counter()
            columns = [next(batches) for _ in range(spec.accumulation)]
            waited = time.perf_counter() - began
            micro_batches = [MicroBatch.of(each) for each in columns]
            reading = Reading.of_rows(np.concatenate([each["reading"] for each in columns]))
            del columns
            lr = learning_rate(step, spec.steps, spec.optimiser)
            result = run_step(engine, micro_batches, lr, spec.model.patch, attend, rows.start, device)
            seconds = time.perf_counter() - began
            spent = of_every_rank([waited, *reading.to_row()], device).numpy()
            consumed = sample + (step + 1 - first) * spec.batch.size
            if not math.isfinite(result.loss):
                raise TrainingError(
                    f"the loss is {result.loss} at step {step + 1} (samples {consumed - spec.batch.size} to "
                    f"{consumed - 1}); lower optimiser.lr or raise optimiser.warmup_steps"
                )
            if log is not None:
                record = {
                    "step": step + 1,
                    "loss": result.loss,
                    "grad_norm": result.grad_norm,
                    "lr": lr,
                    "tokens_per_s": spec.batch.size * spec.tokens / seconds,
                    "mfu": shortest_step / seconds,
                    "data_wait_share": min(spent[:, 0].max() / seconds, 1.0),  # all wait for the one that waits longest
                    "step_seconds": seconds,
                    **{f"read_{name}": value for name, value in Reading.of_rows(spent[:, 1:]).to_json().items()},
                }
                log.add(record)
                if step + 1 == spec.steps or time.monotonic() - told > 5:
                    told = time.monotonic()
                    print(_line(record, spec.steps), flush=True)
            if (step + 1) % spec.checkpoint.every == 0 or step + 1 == spec.steps:
                state = engine.state()
                if log is not None:
                    log.flush()
                    checkpoint.save(output, state, step + 1, source.sampler.cursor(consumed), spec)
                ray.train.report(
                    {"step": step + 1, "loss": result.loss}
                )  # also holds the ranks until rank 0 has written
        batches.close()
        held_out, section = evaluate(engine.model, source, mesh, device) if spec.evaluates else (None, None)
        if section is not None:
            _write_section(output, source.readers[section.survey].survey, section)
    ray.train.report({"step": spec.steps})  # the picture is there before rank 0 says so
    if log is not None:
        log.flush()
        _write_summary(output, spec, held_out, rate)


def _device(spec: JobSpec) -> torch.device:
    """Set up this process's device and threads."""
    torch.set_num_threads(spec.resources.threads)
    if spec.resources.device == "gpu":
        device = ray.train.torch.get_device()
        plan.check(spec, torch.cuda.get_device_properties(device).total_memory)
        return device
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed would guess from what is installed
    return torch.device("cpu")


def _prepare(model: MaskedAutoencoder, spec: JobSpec, device: torch.device) -> str:
    """Settle how blocks are computed, before an engine wraps the model. Returns the names of the attention kernels."""
    if spec.model.compile_blocks:
        compile_blocks(model)
    stacks = spec.model.encoder_size, spec.model.decoder_size
    dtype = torch.bfloat16 if spec.precision == "bf16" else torch.float32
    return kernels.pin(device, dtype, [stack.width // stack.heads for stack in stacks])


def _feed(
    spec: JobSpec, source: SampleSource, mesh: Mesh, statistics: list[dict[str, Any]], steps: int, sample: int
) -> Generator[Columns, None, None]:
    """Micro-batches of this rank for so many `steps`, from sample number `sample` on."""
    order = RankOrder.of(spec, mesh.data_rank, sample)
    count = steps * order.per_step
    if spec.feed == "ray":
        return ray_feed(spec, statistics, source.rows, order, 0, count)
    ahead = batches_ahead(spec, source.rows, spec.micro_batch)
    return direct_feed(source, order, 0, count, spec.micro_batch, ahead)


def _line(record: dict[str, Any], steps: int) -> str:
    return (
        f"step {record['step']}/{steps}  loss {record['loss']:.4f}  grad norm {record['grad_norm']:.3f}  "
        f"lr {record['lr']:.2e}  {record['tokens_per_s']:,.0f} tokens/s  MFU {record['mfu']:.1%}  "
        f"data wait {record['data_wait_share']:.1%}"
    )


def _write_section(output: Output, survey: Survey, section: Section) -> None:
    name = survey.url.rstrip("/").rsplit("/", 1)[-1]
    output.write("reconstruction.png", section_png(section, survey, name))


def _write_summary(output: Output, spec: JobSpec, held_out: HeldOut | None, rate: Peak) -> None:
    records = read_metrics(output)
    if not records:
        raise TrainingError(f"output {output.url}: the metrics of this job are gone; was the folder emptied meanwhile?")
    last, warm = records[-20:], records[1:] or records  # the first step waits for readers to start
    seconds = sum(r["step_seconds"] for r in warm)
    summary = {
        "name": spec.name,
        "surveys": [s.url for s in spec.surveys],
        "tokens_per_sample": spec.tokens,
        "mask_ratio": spec.mask_ratio,
        "parameters": plan.parameters(spec),
        "steps": spec.steps,
        "loss_first": records[0]["loss"],
        "loss_last": sum(r["loss"] for r in last) / len(last),
        "loss_last_steps": len(last),
        "held_out_model": held_out.model if held_out else None,
        "held_out_baseline": held_out.baseline if held_out else None,
        "held_out_windows": held_out.windows if held_out else 0,
        "tokens_per_s": spec.batch.size * spec.tokens * len(warm) / seconds,
        "mfu": sum(r["mfu"] * r["step_seconds"] for r in warm) / seconds,
        "mfu_of": f"{rate.flops / 1e12:.4g} TFLOP/s a device: {rate.of}",
        "data_wait_share": sum(r["data_wait_share"] * r["step_seconds"] for r in warm) / seconds,
    }
    output.write("loss.png", loss_png(records, held_out[:2] if held_out else None))
    output.write("summary.json", json.dumps(summary, indent=1).encode())
