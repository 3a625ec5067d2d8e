"""The driver of a job: checks everything that can be checked, then starts the workers through Ray Train."""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import Any

import pyarrow.fs
import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from sfm import plan
from sfm.spec import JobSpec, SfmError, dump_spec, visible_tokens
from sfm.survey.mdio import Survey
from sfm.survey.preflight import open_all
from sfm.survey.statistics import Statistics, estimate
from sfm.train.output import Output
from sfm.train.start import check_cluster
from sfm.train.worker import train


def run(spec: JobSpec) -> None:
    """Run the job to its end. The caller is connected to Ray and has made every check that needs no cluster;
    `spec` has absolute paths and an output.

    Raises:
        SfmError: with the sentence a user needs: what, where, what to do.
    """
    if spec.output is None:
        raise SfmError("output: the spec has no place for results")
    output = Output(spec.output, spec.storage)
    spec = plan.settle(spec)
    check_cluster(spec, ray.cluster_resources())
    output.write("spec.yaml", dump_spec(spec).encode())
    surveys = open_all(spec)
    statistics = [statistics_of(survey, spec, output).to_json() for survey in surveys]
    print(dump_spec(spec), flush=True)
    for survey, stats in zip(surveys, statistics, strict=True):
        print(describe(survey, stats), flush=True)
    print(size_line(spec), flush=True)

    gpu = spec.resources.device == "gpu"
    folder: Any = None if output.local else pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(output.files))
    trainer = TorchTrainer(
        train,
        train_loop_config={"spec": spec.model_dump(mode="json"), "statistics": statistics},
        scaling_config=ScalingConfig(
            num_workers=spec.parallel.workers,
            use_gpu=gpu,
            accelerator_type=spec.resources.gpu,
            resources_per_worker={"CPU": spec.resources.cpus_per_worker, **({"GPU": 1} if gpu else {})},
        ),
        torch_config=TorchConfig(backend="nccl" if gpu else "gloo"),
        run_config=RunConfig(
            # A name of its own: Ray would otherwise continue an earlier run of that name with its own bookkeeping.
            name=uuid.uuid4().hex,
            storage_path=output.path("ray"),
            storage_filesystem=folder,
            failure_config=FailureConfig(max_failures=spec.scheduling.max_failures),
        ),
    )
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as error:
        raise _sentence(error) from error


def statistics_of(survey: Survey, spec: JobSpec, output: Output) -> Statistics:
    """Statistics of a survey: those kept with the job, so that a job that goes on scales as it did, else estimated."""
    key = hashlib.sha256(f"{survey.identity} {spec.window.clip} {spec.seed}".encode()).hexdigest()[:16]
    name = f"statistics/{key}.json"
    kept = output.read(name)
    if kept is not None:
        return Statistics.from_json(json.loads(kept)["statistics"])
    console = Console(stderr=True)
    columns = TextColumn(f"statistics of {survey.url}"), BarColumn(), MofNCompleteColumn(), TextColumn("chunks")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        found = estimate(
            survey,
            spec.window.clip,
            spec.seed,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    output.write(name, json.dumps({"survey": survey.url, "statistics": found.to_json()}, indent=1).encode())
    return found


def size_line(spec: JobSpec) -> str:
    """One line about the size of the model, of what it sees, and of what that takes."""
    line = (
        f"tokens per sample {spec.tokens:,}, parameters {plan.parameters(spec):,}, "
        f"{plan.memory(spec).total / 2**30:.2f} GiB a device predicted"
    )
    if spec.parallel.context > 1:
        line += f", attention by {spec.parallel.context_mode}"
    if spec.visible != visible_tokens(spec.tokens, spec.mask.ratio):
        line += f"; mask.even makes mask.ratio {spec.mask.ratio} {spec.mask_ratio:.6g}: {spec.visible:,} tokens visible"
    return line


def describe(survey: Survey, statistics: dict[str, Any]) -> str:
    """One line about a survey."""
    sizes = " x ".join(f"{n} {axis.name}" for n, axis in zip(survey.shape, survey.axes, strict=True))
    return f"survey {survey.url}: {sizes}, {survey.dtype}, {statistics['live_share']:.1%} of the voxels with data"


def _sentence(error: BaseException) -> SfmError:
    """The error of the worker that failed first, as a sentence with its rank."""
    failures: dict[int, BaseException] = getattr(error, "worker_failures", {})
    for rank, failure in sorted(failures.items()):
        chain: BaseException | None = failure
        while chain is not None:
            cause = getattr(chain, "cause", None) or chain.__cause__
            if isinstance(chain, SfmError):
                return SfmError(f"rank {rank}: {chain}")
            chain = cause
    for rank, failure in sorted(failures.items()):
        lines = str(failure).strip().splitlines() or [type(failure).__name__]
        return SfmError(f"rank {rank}: {lines[-1]}; the traceback stands above in the log")
    return SfmError(
        f"training failed: {str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__}"
    )
