"""Closed formulas over a job spec: parameters, memory, resources. Pure Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sfm.spec import JobSpec, Transformer, visible_tokens


def block_parameters(size: Transformer, qk_norm: bool = False) -> int:
    """Parameters of one pre-norm Transformer block: two norms, attention, feed-forward, all with bias.

    Attention has as many whether it looks at its own tokens or at others; `qk_norm` adds a gain per channel of a
    head for queries and one for keys.
    """
    w, m = size.width, size.mlp
    return 4 * w + (4 * w * w + 4 * w) + (2 * w * m + m + w) + (2 * w // size.heads if qk_norm else 0)


def parameters(spec: JobSpec) -> int:
    """Trainable parameters of the model that `spec` describes."""
    enc, dec = spec.model.encoder_size, spec.model.decoder_size
    patch = math.prod(spec.model.patch)
    embed = patch * enc.width + enc.width
    encoder = enc.depth * block_parameters(enc, spec.model.qk_norm) + 2 * enc.width
    bridge = enc.width * dec.width + dec.width + dec.width  # projection, mask token
    decoder = dec.depth * block_parameters(dec, spec.model.qk_norm) + 2 * dec.width
    head = dec.width * patch + patch
    return embed + encoder + bridge + decoder + head


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the peak of a training step, by what they hold (an estimate)."""

    weights: int
    gradients: int
    optimiser: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimiser + self.activations


def memory(spec: JobSpec) -> Memory:
    """Estimate the memory of one device.

    Weights and gradients are held in the precision of the pass, master weights (bf16 only) and AdamW's
    two moments in fp32; ZeRO stage 1 shards the optimiser state over all workers, stage 2 the gradients
    too, stage 3 the weights too (Rajbhandari et al. 2020), and so does fsdp2. Engines ddp and fsdp2 sum
    gradients in fp32; fsdp2 keeps them whole while it accumulates. Activations count what autograd saves per
    block: 12 values per channel and token plus 2 per feed-forward channel, and keys and values
    of all the sample's tokens, which a context-parallel rank gathers.
    """
    n, workers = parameters(spec), spec.parallel.workers
    width = 2 if spec.precision == "bf16" else 4
    engine = spec.parallel.engine
    stage = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3}[engine]
    weights = n * width // (workers if stage >= 3 else 1)
    shards_gradients = stage >= 2 and not (engine == "fsdp2" and spec.accumulation > 1)
    gradients = n * (4 if engine in ("ddp", "fsdp2") else width) // (workers if shards_gradients else 1)
    optimiser = n * (8 + (4 if spec.precision == "bf16" else 0)) // (workers if stage >= 1 else 1)

    tokens = spec.tokens
    visible = visible_tokens(tokens, spec.mask.ratio)
    share = math.ceil(spec.grid[0] / spec.parallel.context) / spec.grid[0]  # of the widest slab

    def stack(size: Transformer, length: int) -> float:
        own = length * share * (12 * size.width + 2 * size.mlp)
        gathered = length * 2 * size.width if spec.parallel.context > 1 else 0
        return size.depth * (own + gathered)

    saved = stack(spec.model.encoder_size, visible) + stack(spec.model.decoder_size, tokens)
    voxels = math.prod(spec.window.shape) * share
    activations = spec.micro_batch * (saved * width + voxels * (4 + 4 + width))  # input, target, prediction
    return Memory(weights, gradients, optimiser, int(activations))


@dataclass(frozen=True)
class Request:
    """What a job takes from a cluster while it runs. Counted in Ray's logical resources."""

    workers: int
    cpus: float
    gpus: int


def request(spec: JobSpec) -> Request:
    """Resources that all workers of a job (and their readers) hold together."""
    workers = spec.parallel.workers
    per_worker = spec.resources.cpus_per_worker + (spec.resources.reader_cpus if spec.feed == "ray" else 0)
    return Request(workers, workers * per_worker, workers if spec.resources.device == "gpu" else 0)
