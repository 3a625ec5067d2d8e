"""Memory of one device at the peak of a training step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sfm.plan.engines import engine_memory, itemsize
from sfm.spec import JobSpec, Transformer


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
    width = itemsize(spec)
    tokens = spec.tokens
    visible = spec.visible
    share = math.ceil(spec.grid[0] / spec.parallel.context) / spec.grid[0]  # of the widest slab

    def stack(size: Transformer, length: int) -> float:
        own = length * share * (12 * size.width + 2 * size.mlp)
        gathered = length * 2 * size.width if spec.parallel.context > 1 else 0
        return size.depth * (own + gathered)

    saved = stack(spec.model.encoder_size, visible) + stack(spec.model.decoder_size, tokens)
    voxels = math.prod(spec.window.shape) * share
    activations = spec.micro_batch * (saved * width + voxels * (4 + 4 + width))  # input, target, prediction
    return Memory(*engine_memory(spec), int(activations))
