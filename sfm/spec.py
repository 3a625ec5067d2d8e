"""The job spec: the one description of a job, read by every door.

`POST /jobs`, `sfm submit`, `sfm validate` and `python -m sfm.train` all build a
:class:`JobSpec`. Every field states its unit and its default. What cannot work is
refused here, in a sentence, before anything is started.

This file imports neither torch nor Ray: the control plane runs on it alone.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator


class SfmError(Exception):
    """Base of every error that a user is meant to read: one sentence, with where and what to do."""


class SpecError(SfmError):
    """The job spec is malformed or asks for something impossible."""


Positive = Annotated[int, Field(ge=1)]
Shape3 = tuple[Positive, Positive, Positive]  # (inline, crossline, sample)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Storage(_Model):
    """Where an object store listens. Credentials never stand in a spec: they come from the
    environment of the process that reads (`AWS_ACCESS_KEY_ID` ..., a profile, an instance role)."""

    endpoint_url: str | None = None
    """URL of the server; default: `AWS_ENDPOINT_URL` for s3, else that of AWS, Google or the Azure account."""
    region: str | None = None
    """Region of the bucket; default: `AWS_REGION` or `AWS_DEFAULT_REGION`."""
    anonymous: bool = False
    """Read a public bucket without signing requests; default false."""
    profile: str | None = None
    """Profile of the AWS configuration files to take credentials from; default: `AWS_PROFILE`."""
    client: Literal["obstore", "s3fs"] = "obstore"
    """Who reads surveys from the store: obstore (Rust; s3, gs, az and https), or s3fs (Python; s3 only); default
    obstore, the faster one."""
    verify: bool = False
    """Whether chunks are fetched whole and compared with the MD5 sum that their store states, where it states one for an
    object (not for shards; obstore only; about 2 ns a byte); default false."""

    @model_validator(mode="after")
    def _who_verifies(self) -> Storage:
        if self.verify and self.client != "obstore":
            raise ValueError(f"verify compares checksums that client {self.client} does not show: take client obstore")
        return self


class SurveySource(_Model):
    """One MDIO survey to train on."""

    url: str = Field(min_length=1)
    """`s3://bucket/key.mdio`, likewise gs://, az:// or https://, or a local path of an MDIO store, seen from the
    workers."""
    weight: float = Field(1.0, gt=0)
    """Relative share of training windows drawn from this survey (no unit); default 1."""
    held_out: bool = False
    """Whether the whole survey is for evaluation and no line of it for training; default false."""
    storage: Storage = Storage()
    """Object store of this survey; default: as the environment says."""


class Window(_Model):
    """The sub-volume that is one training sample, and how it is drawn and scaled."""

    shape: Shape3 = (128, 128, 128)
    """Voxels along (inline, crossline, sample); default 128 x 128 x 128."""
    held_out: float = Field(0.1, ge=0, le=0.5)
    """Least share of the survey's lines kept out of training for evaluation, along the
    horizontal axis that holds most windows; at least one window; 0 keeps nothing out. Default 0.1."""
    blocks: Positive = 1
    """Blocks of lines that the held-out share is spread over; each holds at least one window; default 1."""
    guard: int = Field(0, ge=0)
    """Lines between training and held-out ones that neither uses; default 0."""
    min_live: float = Field(0.1, ge=0, le=1)
    """Least share of a window's traces that exist, by the survey's trace mask; windows with fewer are never used, and
    0 uses all; default 0.1."""
    pad: bool = False
    """Whether a survey smaller than the window along an axis is filled up with no data, rather than refused; default
    false."""
    align: bool = False
    """Whether training windows start only where they meet as few chunks of their survey as they can (a window of whole
    chunks: on chunk borders) and at the ends of its lines: fewer bytes to read, and fewer different windows; default
    false."""
    clip: float = Field(99.5, gt=50, le=100)
    """Amplitudes beyond this two-sided percentile of the survey are clipped (percent); default 99.5."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Number format of scaled amplitudes on their way from the reader to the device, where they become float32 again;
    the shorter ones halve that traffic; default float32."""


class Transformer(_Model):
    """Size of a stack of pre-norm Transformer blocks."""

    width: Positive
    """Channels of a token."""
    depth: Positive
    """Number of blocks."""
    heads: Positive
    """Attention heads; must divide `width` into an even number of channels."""
    mlp: Positive
    """Hidden channels of the feed-forward layer."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Transformer:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(
                f"heads {self.heads} must divide width {self.width} into an even number of channels per head"
            )
        return self


def _size(width: int, depth: int, heads: int, mlp: int | None = None) -> Transformer:
    return Transformer(width=width, depth=depth, heads=heads, mlp=mlp or 4 * width)


PRESETS: dict[str, tuple[Transformer, Transformer]] = {
    # name: (encoder, decoder). From `base` on, heads have 128 channels, the fastest size for GPU kernels.
    "tiny": (_size(192, 4, 3), _size(96, 2, 3)),
    "small": (_size(384, 12, 6), _size(256, 4, 4)),
    "base": (_size(768, 12, 6), _size(512, 8, 4)),
    "large": (_size(1024, 24, 8), _size(512, 8, 4)),
    "huge": (_size(1280, 32, 10), _size(512, 8, 4)),
    "1.8b": (_size(1664, 48, 13, 8192), _size(512, 8, 4)),  # width, depth, mlp of ViT-G (Zhai et al. 2022)
}


class Model(_Model):
    """The masked autoencoder (He et al. 2022) over 3D patches."""

    preset: str = "base"
    """One of tiny, small, base, large, huge, 1.8b; default base."""
    patch: Shape3 = (16, 16, 16)
    """Voxels of a patch along (inline, crossline, sample); default 16 x 16 x 16."""
    encoder: Transformer | None = None
    """Explicit encoder size; default: the preset's."""
    decoder: Transformer | None = None
    """Explicit decoder size; default: the preset's."""
    positions: Literal["sincos", "rope"] = "sincos"
    """Positions: added factorised 3D sine-cosine, or rotary (RoPE-3D) on queries and keys; default sincos."""
    qk_norm: bool = False
    """Whether queries and keys of each head are scaled to unit root mean square, times a learnt gain, before they are
    rotated and compared: attention logits stay bounded at high learning rates; default false."""
    decoder_attention: Literal["self", "cross"] = "self"
    """What the decoder's blocks attend to: self (visible and masked tokens among each other; He et al. 2022), or
    cross (masked tokens ask the encoder's output, not each other; Fu et al. 2024, CrossMAE); default self."""
    decode_share: float = Field(1.0, gt=0, le=1)
    """Share of the masked patches that a training step predicts (no unit), drawn at random with the mask and rounded
    in each patch row, at least one; below 1 only with decoder_attention cross; default 1."""
    registers: int = Field(0, ge=0)
    """Learnt tokens without a place that go with the patches through both stacks, the first of them a class token
    (Dosovitskiy et al. 2021; Darcet et al. 2024); default 0."""
    normalise_patches: bool = False
    """Whether the target of each patch is scaled to zero mean and unit variance; default false."""
    checkpoint_activations: bool = False
    """Whether each block keeps its input alone and is computed again in the backward pass: a third more
    compute for a fraction of the memory, the same gradients; default false."""
    keep_attention: bool = False
    """Whether, with `checkpoint_activations`, each block also keeps what its attention gave, and does not compute it
    again: twice the memory, up to two ninths less compute on long windows; default false."""
    offload_activations: bool = False
    """Whether what `checkpoint_activations` keeps waits in the host's memory for the backward pass; default false."""
    compile_blocks: bool = False
    """Whether each block is compiled (torch.compile), which takes a minute at the start; default false."""

    @field_validator("preset")
    @classmethod
    def _preset_exists(cls, preset: str) -> str:
        if preset not in PRESETS:
            raise ValueError(f"unknown preset '{preset}'{_nearest(preset, PRESETS)}")
        return preset

    @model_validator(mode="after")
    def _recomputation_has_variants(self) -> Model:
        if self.offload_activations and not self.checkpoint_activations:
            raise ValueError("offload_activations moves what checkpoint_activations keeps: set both, or neither")
        if self.keep_attention and not self.checkpoint_activations:
            raise ValueError("keep_attention adds to what checkpoint_activations keeps: set both, or neither")
        if self.keep_attention and self.compile_blocks:
            raise ValueError("keep_attention looks into blocks, which compile_blocks closes: set one of them")
        return self

    @model_validator(mode="after")
    def _only_cross_attention_leaves_tokens_out(self) -> Model:
        if self.decode_share < 1 and self.decoder_attention != "cross":
            raise ValueError(
                f"decode_share {self.decode_share} leaves masked tokens out, which decoder_attention "
                f"{self.decoder_attention} cannot: take decoder_attention cross or decode_share 1"
            )
        return self

    @property
    def encoder_size(self) -> Transformer:
        return self.encoder or PRESETS[self.preset][0]

    @property
    def decoder_size(self) -> Transformer:
        return self.decoder or PRESETS[self.preset][1]


class Mask(_Model):
    """Which patches the encoder does not see."""

    ratio: float = Field(0.75, gt=0, lt=1)
    """Share of patches that are masked (no unit); default 0.75."""
    even: bool = False
    """Whether the ratio is adjusted until visible tokens divide evenly over the context ranks, and windows and
    registers that do not are refused; `sfm plan` shows the ratio that results. Nothing but context_mode torch needs
    it; default false."""


Engine = Literal["ddp", "zero1", "zero2", "zero3", "fsdp2"]

ContextMode = Literal["auto", "gather", "ring", "ulysses", "hybrid", "torch"]


class Parallel(_Model):
    """How the workers split the work. workers = data degree x context degree."""

    workers: Positive = 1
    """Training processes, one device each; default 1."""
    context: Positive = 1
    """Context-parallel degree: how many workers share one sample's tokens; default 1."""
    context_mode: ContextMode = "auto"
    """How attention crosses workers: gather (keys and values of all), ring (they travel), ulysses (heads are
    traded for tokens), hybrid (ulysses among neighbours, rings between), torch (PyTorch's context_parallel; GPUs and
    mask.even only), or auto (the one that moves fewest bytes; `sfm plan` shows which); default auto."""
    ulysses: Positive = 1
    """Neighbours that trade heads in hybrid mode; must divide `context`; default 1."""
    engine: Engine = "zero2"
    """Who keeps weights, gradients and optimiser state: ddp (everyone everything), zero1, zero2, zero3 (DeepSpeed
    ZeRO by stage), or fsdp2 (PyTorch's, which shards what zero3 shards); default zero2."""

    @model_validator(mode="after")
    def _context_divides_workers(self) -> Parallel:
        if self.workers % self.context:
            raise ValueError(f"context {self.context} must divide workers {self.workers}")
        if self.context_mode != "hybrid" and self.ulysses > 1:
            raise ValueError(f"ulysses {self.ulysses} is for context_mode hybrid, not {self.context_mode}")
        if self.context_mode == "hybrid" and (self.context % self.ulysses or not 1 < self.ulysses < self.context):
            between = [n for n in range(2, self.context) if self.context % n == 0]
            advice = f"take one of {between}" if between else "take context_mode ring or ulysses"
            raise ValueError(f"ulysses {self.ulysses} must split context {self.context} into groups; {advice}")
        return self

    @property
    def head_degree(self) -> int:
        """Ranks among which attention heads are dealt out."""
        return {"ulysses": self.context, "hybrid": self.ulysses}.get(self.context_mode, 1)

    @property
    def data(self) -> int:
        """Data-parallel degree."""
        return self.workers // self.context


class Batch(_Model):
    """Samples per optimiser step. Accumulation = size / (data degree x micro)."""

    size: Positive = 8
    """Global batch: samples per optimiser step over all workers; default 8."""
    micro: Positive | None = None
    """Samples that one data-parallel rank computes at a time; default: its whole share of the step."""


class Optimiser(_Model):
    """AdamW (Loshchilov & Hutter 2019) with linear warm-up and cosine decay."""

    lr: float = Field(1e-3, gt=0)
    """Peak learning rate (per step); default 1e-3."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the last step; default 0."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the rate rises linearly from 0; default 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment; default 0.9, 0.95."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment; default 1e-8."""
    weight_decay: float = Field(0.05, ge=0)
    """Decoupled decay of matrices (biases, norms, mask token and registers have none); default 0.05."""
    clip_norm: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 clips nothing; default 1."""

    @model_validator(mode="after")
    def _ranges(self) -> Optimiser:
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas {list(self.betas)} must lie in [0, 1)")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} must not exceed lr {self.lr}")
        return self


class Checkpoint(_Model):
    """When training state is written under `output`, and where a job begins."""

    every: Positive = 500
    """Steps between checkpoints (one is always written after the last step); default 500."""
    keep: Positive = 2
    """Committed checkpoints kept; older ones are removed after a newer one is verified; default 2."""
    resume: bool = True
    """Continue from the newest committed checkpoint under `output`, if there is one; false refuses an output
    that holds any. Restarts within a job always continue. Default true."""
    start_from: str | None = None
    """URL of another job's output to continue from when this job has no checkpoint yet; default none."""


class Resources(_Model):
    """What each worker takes from the cluster."""

    device: Literal["cpu", "gpu"] = "cpu"
    """Device of a worker; gpu takes one GPU each; default cpu."""
    gpu: Literal["A100", "H100", "H200", "B200", "B300"] | None = None
    """Model of the GPUs: workers are started on these alone, and a job that does not fit them is refused; default:
    whatever the cluster has."""
    memory_gib: float | None = Field(None, gt=0)
    """Memory of a device that the job may take (GiB), for devices that `gpu` does not name; a job that does not fit
    is refused; default: that of `gpu`, else nothing is checked."""
    cpus_per_worker: float = Field(1, gt=0)
    """Logical CPUs reserved per worker; default 1."""
    threads: Positive = 1
    """Compute threads of a worker's torch; default 1."""
    reader_cpus: float = Field(0.25, ge=0)
    """Logical CPUs reserved for each worker's reader actor (feed: ray); default 0.25."""
    cache_mib: int = Field(512, ge=0)
    """Decoded chunks a reader keeps in memory (MiB), for surveys of which at least half fits; default 512."""
    transfer_mib: Positive = 256
    """Memory for chunks on their way in each reader (MiB), which bounds how many that are; default 256."""
    ahead_mib: Positive = 512
    """Windows read ahead of each worker (MiB), at least two micro-batches; default 512."""
    decoders: Positive = 2
    """Threads of each reader that decode chunks; default 2."""
    requests: Positive = 128
    """Requests that each reader has in flight at most (it finds out how many pay); default 128."""
    disk_cache: str | None = None
    """Folder on every node that keeps chunks as stored, for surveys read more than once; default none."""
    disk_cache_gib: float = Field(100, gt=0)
    """Size of `disk_cache` (GiB), beyond which the least recently used go; default 100."""

    @field_validator("disk_cache")
    @classmethod
    def _a_folder(cls, value: str | None) -> str | None:
        if value is not None and "://" in value:
            raise ValueError(f"{value} is no folder on a node")
        return value

    @model_validator(mode="after")
    def _a_model_of_gpu_needs_gpus(self) -> Resources:
        if self.gpu is not None and self.device != "gpu":
            raise ValueError(f"gpu {self.gpu} is for device gpu, not {self.device}")
        return self


class Scheduling(_Model):
    """How the control plane treats the job."""

    priority: int = Field(0, ge=-100, le=100)
    """Jobs of higher priority leave the queue first; default 0."""
    max_failures: int = Field(0, ge=0)
    """How many failures of its workers a job survives, continuing from its newest checkpoint; default 0."""


class JobSpec(_Model):
    """One training job."""

    name: str = Field("sfm", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Name shown in lists: letters, digits, dot, dash, underscore, at most 63; default sfm."""
    surveys: tuple[SurveySource, ...] = Field(min_length=1)
    """The MDIO surveys to train on; required."""
    window: Window = Window()
    model: Model = Model()
    mask: Mask = Mask()
    parallel: Parallel = Parallel()
    batch: Batch = Batch()
    optimiser: Optimiser = Optimiser()
    steps: Positive = 1000
    """Optimiser steps of the whole job; default 1000."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Number format of the forward and backward pass (bf16 keeps fp32 master weights); default fp32."""
    feed: Literal["ray", "direct"] = "ray"
    """Who reads windows: Ray Data actors, or threads in the worker; same order, same bits; default ray."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of weights, window order and masks; default 0."""
    checkpoint: Checkpoint = Checkpoint()
    resources: Resources = Resources()
    scheduling: Scheduling = Scheduling()
    output: str | None = None
    """URL (local path or `s3://`) for checkpoints, metrics and pictures; default: chosen by the
    control plane, else `runs/NAME` beside the caller."""
    storage: Storage = Storage()
    """Object store of `output`; default: as the environment says."""

    @field_validator("surveys")
    @classmethod
    def _one_is_for_training(cls, surveys: tuple[SurveySource, ...]) -> tuple[SurveySource, ...]:
        if all(survey.held_out for survey in surveys):
            raise ValueError(
                "every survey is held_out for evaluation, which leaves none for training: drop one held_out"
            )
        return surveys

    @property
    def evaluates(self) -> bool:
        """Whether anything is kept out of training, to evaluate on."""
        return bool(self.window.held_out) or any(survey.held_out for survey in self.surveys)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches of a window along (inline, crossline, sample)."""
        i, x, t = (w // p for w, p in zip(self.window.shape, self.model.patch, strict=True))
        return i, x, t

    @property
    def tokens(self) -> int:
        """Tokens (patches) of one sample."""
        return math.prod(self.grid)

    @property
    def visible(self) -> int:
        """Visible tokens (patches) of one sample."""
        visible = visible_tokens(self.tokens, self.mask.ratio)
        if not self.mask.even:
            return visible
        least, step = self.grid[0], self.parallel.context  # every patch row shows and hides at least one
        choices = range(-(-least // step) * step, self.tokens - least + 1, step)
        return min(choices, key=lambda n: abs(n - visible), default=visible)

    @property
    def mask_ratio(self) -> float:
        """Share of patches that are masked, in whole patches: what `mask` comes to."""
        return 1 - self.visible / self.tokens

    @property
    def micro_batch(self) -> int:
        """Samples that one data-parallel rank computes at a time."""
        return self.batch.micro or self.batch.size // self.parallel.data

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimiser step on each data-parallel rank."""
        return self.batch.size // (self.parallel.data * self.micro_batch)

    @model_validator(mode="after")
    def _fits_together(self) -> JobSpec:
        for axis, size, patch in zip(
            ("inline", "crossline", "sample"), self.window.shape, self.model.patch, strict=True
        ):
            if size % patch:
                below, above = size // patch * patch, -(-size // patch) * patch
                choice = f"{below} or {above}" if below else f"{above}"
                raise ValueError(
                    f"model.patch {patch} does not divide window.shape {size} along {axis}; take a window of {choice}"
                )
        data = self.parallel.data
        if self.batch.size % data:
            raise ValueError(
                f"batch.size {self.batch.size} must be a multiple of the data degree {data} "
                f"(parallel.workers {self.parallel.workers} / parallel.context {self.parallel.context})"
            )
        if self.batch.size % (data * self.micro_batch):
            raise ValueError(
                f"batch.micro {self.batch.micro} must divide each data rank's share of batch.size: "
                f"{self.batch.size} / {data} = {self.batch.size // data}"
            )
        rows = self.grid[0]
        if self.parallel.context > rows:
            raise ValueError(
                f"parallel.context {self.parallel.context} exceeds the {rows} patch rows that window.shape "
                f"{self.window.shape[0]} holds along inline; the largest degree here is {rows}"
            )
        heads = math.gcd(self.model.encoder_size.heads, self.model.decoder_size.heads)
        if heads % self.parallel.head_degree:
            raise ValueError(
                f"parallel.context_mode {self.parallel.context_mode} deals heads out to {self.parallel.head_degree} "
                f"ranks, which must divide the heads of both stacks (model.encoder {self.model.encoder_size.heads}, "
                f"model.decoder {self.model.decoder_size.heads}): take a degree that divides {heads}, or ring or gather"
            )
        visible = visible_tokens(self.tokens, self.mask.ratio)
        if not rows <= visible <= self.tokens - rows:
            raise ValueError(
                f"mask.ratio {self.mask.ratio} leaves {visible} of {self.tokens} tokens visible; window.shape "
                f"needs at least one visible and one masked token in each of its {rows} patch rows"
            )
        if self.model.compile_blocks and self.parallel.engine == "zero3":
            raise ValueError(
                "model.compile_blocks: torch.compile gives up on the hooks that parallel.engine zero3 puts into every "
                "block; take fsdp2, which shards as much, or model.compile_blocks false"
            )
        if self.model.keep_attention and self.parallel.context_mode in ("ring", "hybrid", "torch"):
            raise ValueError(
                f"model.keep_attention keeps one result of attention for each block, but parallel.context_mode "
                f"{self.parallel.context_mode} makes one for each worker: take gather, ulysses or auto"
            )
        self._check_even()
        if self.optimiser.warmup_steps >= self.steps:
            raise ValueError(
                f"optimiser.warmup_steps {self.optimiser.warmup_steps} must be fewer than steps {self.steps}"
            )
        return self

    def _check_even(self) -> None:
        context, rows, registers = self.parallel.context, self.grid[0], self.model.registers
        if self.parallel.context_mode == "torch" and context > 1:
            if self.resources.device != "gpu":
                raise ValueError(
                    "parallel.context_mode torch has no kernels for CPUs: take gather or ring, or resources.device gpu"
                )
            if self.precision != "bf16":
                raise ValueError(
                    f"parallel.context_mode torch has no kernels for precision {self.precision}: take gather or ring, "
                    f"or precision bf16"
                )
            if not self.mask.even:
                raise ValueError("parallel.context_mode torch shares tokens out evenly only: set mask.even true")
        if not self.mask.even:
            return
        if rows % context:
            degrees = [n for n in range(1, rows + 1) if rows % n == 0]
            nearest = min(degrees, key=lambda n: abs(n - context))
            raise ValueError(
                f"mask.even: the {rows} patch rows that window.shape {self.window.shape[0]} holds along inline do not "
                f"divide evenly over parallel.context {context}; the nearest degree that does is {nearest}"
            )
        if registers % context:
            fewer = registers // context * context
            raise ValueError(
                f"mask.even: model.registers {registers} do not divide evenly over parallel.context {context}; "
                f"the nearest numbers that do are {fewer} and {fewer + context}"
            )


def absolute_url(url: str, base: Path) -> str:
    """`url` with a relative local path made absolute against `base`; URLs with a scheme are left alone."""
    return url if "://" in url else os.path.normpath(base / Path(url).expanduser())


def absolute(spec: JobSpec, base: Path) -> JobSpec:
    """`spec` with its relative local paths made absolute against `base`: workers run in folders of their own."""
    surveys = tuple(s.model_copy(update={"url": absolute_url(s.url, base)}) for s in spec.surveys)
    checkpoint = spec.checkpoint
    if checkpoint.start_from is not None:
        checkpoint = checkpoint.model_copy(update={"start_from": absolute_url(checkpoint.start_from, base)})
    resources = spec.resources
    if resources.disk_cache is not None:
        resources = resources.model_copy(update={"disk_cache": absolute_url(resources.disk_cache, base)})
    output = spec.output and absolute_url(spec.output, base)
    return spec.model_copy(
        update={"surveys": surveys, "checkpoint": checkpoint, "resources": resources, "output": output}
    )


def visible_tokens(tokens: int, ratio: float) -> int:
    """Visible tokens of a sample of `tokens` patches at mask ratio `ratio`, rounded to nearest."""
    return tokens - int(ratio * tokens + 0.5)


def parse_spec(data: Any) -> JobSpec:
    """Build a spec from decoded YAML or JSON.

    Raises:
        SpecError: with one line per mistake, each naming the field, and for an unknown field the nearest known one.
    """
    if not isinstance(data, Mapping):
        raise SpecError(f"a job spec is a mapping of fields, not {type(data).__name__}; see examples/ for a start")
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise SpecError("\n".join(_sentence(e) for e in error.errors())) from None


def load_spec(source: str | Path) -> JobSpec:
    """Read a spec from a YAML or JSON file.

    Raises:
        SpecError: the file is missing, is not YAML, or is no valid spec.
    """
    path = Path(source)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise SpecError(f"job spec {path}: {reason}") from None
    return parse_spec(parse_yaml(text, where=str(path)))


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML would keep the last without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: list[Any] = []
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{name}' stands twice", key.start_mark)
            seen.append(name)
        return super().construct_mapping(node, deep)


_DEEPEST = 32  # levels of nesting that are read: PyYAML's time grows with their square


def parse_yaml(text: str, *, where: str) -> Any:
    """Decode YAML (of which JSON is a part), without aliases.

    Raises:
        SpecError: with the line and column of the mistake.
    """
    try:
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):  # a few lines of these can stand for terabytes
                raise SpecError(f"{where}: YAML aliases (*name) are not accepted; write the values out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise SpecError(f"{where}: nested more than {_DEEPEST} levels deep; a job spec is not")
        return yaml.load(text, _Loader)
    except ValueError as error:  # such as a date of month 13
        raise SpecError(f"{where}: malformed YAML: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be read"
        raise SpecError(f"{where}{place}: malformed YAML: {problem}") from None


def dump_spec(spec: JobSpec) -> str:
    """The spec in full as YAML: what a job stores with its results."""
    return yaml.safe_dump(json.loads(spec.model_dump_json()), sort_keys=False)


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"


def _fields_at(location: tuple[Any, ...]) -> list[str]:
    """Names of the fields of the model that holds the last element of `location`."""
    model: Any = JobSpec
    for key in location[:-1]:
        if isinstance(key, int):
            continue
        annotation = model.model_fields[key].annotation
        while not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            annotation = next(a for a in get_args(annotation) if a is not type(None))
        model = annotation
    return list(model.model_fields)


def _sentence(error: Any) -> str:
    location = error["loc"]
    field = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in location).lstrip(".")
    if error["type"] == "extra_forbidden":
        return f"{field}: unknown field{_nearest(location[-1], _fields_at(location))}"
    if error["type"] == "missing":
        return f"{field}: this field is required"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{field}: {message}" if field else message
    given = json.dumps(error["input"], default=str)
    return f"{field}: {message[0].lower() + message[1:]}, not {given[:80]}"
