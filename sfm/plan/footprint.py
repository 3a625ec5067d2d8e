"""Memory of one device at the peak of a training step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from sfm.plan.context import settle
from sfm.plan.engines import engine_memory, itemsize
from sfm.plan.shares import Shares, shares, visible_per_row
from sfm.plan.tiles import HEAD_TILE, HIDDEN_TILE
from sfm.spec import ContextMode, JobSpec, Transformer


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device at the peak of a training step, by what they hold."""

    weights: int
    gradients: int
    optimiser: int
    exchange: int
    """What the engine gathers or sends at a time."""
    activations: int
    """What the forward pass keeps for the backward pass, what the backward pass works in, and the windows."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimiser + self.exchange + self.activations


def memory(spec: JobSpec) -> Memory:
    """Predict the memory of the fullest device, of what torch allocates.

    Weights, gradients and optimiser state by :func:`sfm.plan.engines.engine_memory`. Activations are counted tensor by
    tensor as the model's blocks keep them; the backward pass goes through the head, the decoder and the encoder, and
    the largest of these moments is the peak.
    """
    spec = settle(spec)
    part = shares(spec)
    activations = max(_activations(spec, part, rank) for rank in range(spec.parallel.context))
    return Memory(*engine_memory(spec), max(activations, _baseline(spec, part)))


class _Stack(NamedTuple):
    """Tokens of one micro-batch on a rank that go through a stack of blocks."""

    size: Transformer
    queries: int
    keys: int
    """Tokens on this rank that are attended to."""
    all_keys: int
    """Those of all ranks."""
    cross: bool


def _activations(spec: JobSpec, part: Shares, rank: int) -> int:
    """Bytes on one context rank at the peak, beside the engine's."""
    b, s, patch = spec.micro_batch, itemsize(spec), math.prod(spec.model.patch)
    predicted = b * part.predicted[rank]
    encoder = _Stack(
        spec.model.encoder_size, b * part.encoder[rank], b * part.encoder[rank], b * sum(part.encoder), False
    )
    decoder = _Stack(
        spec.model.decoder_size,
        b * part.queries[rank],
        b * part.keys[rank],
        b * sum(part.keys),
        spec.model.decoder_attention == "cross",
    )
    tile = min(predicted, HEAD_TILE)
    # Amplitudes, prediction, target and the error's gradient of a tile, in fp32; in bf16 the prediction twice.
    head = tile * patch * 4 * (4 if s == 4 else 5)
    in_head = 0 if predicted > HEAD_TILE else 2 * predicted * patch * 4  # a single tile's prediction and target stay

    windows = b * part.voxels[rank] * 4 + b * part.encoder[rank] * patch * s  # and visible patches
    around = {stack: _around(spec, stack, s) for stack in (encoder, decoder)}
    kept = {stack: _kept(spec, stack, s) for stack in (encoder, decoder)}
    forward = windows + sum(around.values()) + sum(kept.values())
    return max(
        forward + max(head, in_head),
        forward - around[decoder] // 2 + _backward(spec, decoder, s),
        windows + around[encoder] // 2 + kept[encoder] + _backward(spec, encoder, s),
    )


def _baseline(spec: JobSpec, part: Shares) -> int:
    """Bytes on the fullest device while the baseline is evaluated: more than training's where slabs are thin and the
    model is small. All else in an evaluation takes less than training."""
    if not spec.evaluates:
        return 0
    voxel, patch, visible = 4, 4 * math.prod(spec.model.patch), visible_per_row(spec.grid, spec.mask_ratio)
    near = min(3, spec.grid[0]) * max(visible) * patch  # visible patches of a row and of those beside it
    tile = min(spec.grid[1] * spec.grid[2] - min(visible), HEAD_TILE) * patch
    section = 3 * math.prod(spec.window.shape[1:]) * voxel
    # What is near is copied once; then there are the means of a tile, its target, and both scaled.
    return max(part.voxels) * voxel + section + near + max(near, 4 * tile)


def _around(spec: JobSpec, stack: _Stack, s: int) -> int:
    """What is kept before and after a stack: its last block's output, normalised too, and rotations."""
    rotations = 2 * (stack.size.width // stack.size.heads // 2) if spec.model.positions == "rope" else 0
    memory = stack.keys * (stack.size.width + rotations) if stack.cross else 0
    return s * (stack.queries * (2 * stack.size.width + rotations) + memory)


def _kept(spec: JobSpec, stack: _Stack, s: int) -> int:
    """What all blocks keep from the forward to the backward pass."""
    if not spec.model.checkpoint_activations:
        return stack.size.depth * _block(spec, stack, s)
    inputs = s * stack.size.width * stack.queries
    results = (inputs + 4 * stack.size.heads * stack.queries) if spec.model.keep_attention else 0
    offloaded = spec.model.offload_activations and spec.resources.device == "gpu"
    # Off-loaded are inputs alone: the one in work and the one that travels stay.
    return inputs * (2 if offloaded else stack.size.depth) + results * stack.size.depth


def _tiled(spec: JobSpec, stack: _Stack) -> bool:
    """Whether the hidden layer of a feed-forward is made in tiles."""
    return spec.model.checkpoint_activations and stack.queries > HIDDEN_TILE


def _block(spec: JobSpec, stack: _Stack, s: int) -> int:
    """What one block keeps when it is not computed again."""
    w, hidden = stack.size.width, 0 if _tiled(spec, stack) else 2 * stack.size.mlp * stack.queries
    norms = 4 * w * stack.queries  # inputs and outputs of both
    statistics = 4 * stack.queries * (4 + stack.size.heads)  # of norms and of the softmax, in fp32
    return s * (norms + hidden + _attention(spec, stack)) + statistics


def _attention(spec: JobSpec, stack: _Stack) -> int:
    """Numbers that attention keeps in one block: queries, keys and values as they are compared, and the output."""
    w, q, k = stack.size.width, stack.queries, stack.keys
    mode: ContextMode | None = spec.parallel.context_mode if spec.parallel.context > 1 else None
    rotated = spec.model.positions == "rope"
    projected = w * (q + 2 * k)  # before norms, rotation and exchange
    normalised = w * (q + k) + (projected if mode or stack.cross else 0) if spec.model.qk_norm else 0
    if mode is None:
        compared = w * (q + k) if rotated else 0  # besides the projections, of which the values are a part
        if stack.cross and rotated:
            projected -= w * q
        return projected + compared + w * q * (2 if rotated else 1) + normalised
    looked_at = stack.all_keys if mode in ("gather", "torch") else k
    return w * (q + 2 * looked_at) + 2 * w * q + normalised


def _backward(spec: JobSpec, stack: _Stack, s: int) -> int:
    """What the backward pass of the last block of a stack works in, beside what was kept."""
    w, q, k = stack.size.width, stack.queries, stack.keys
    again = spec.model.checkpoint_activations
    block = _block(spec, stack, s) - s * w * q if again else 0  # made again, but for its input
    exact = 4 if spec.resources.device == "cpu" else s  # the CPU's kernel computes in fp32
    tiled = _tiled(spec, stack)
    hidden = HIDDEN_TILE if tiled else q
    feed_forward = s * (2 * w * q + stack.size.mlp * hidden * (4 if tiled else 1))
    freed = s * (2 * w * q + (0 if tiled else 2 * stack.size.mlp * q))
    mode = spec.parallel.context_mode if spec.parallel.context > 1 else None
    attention = 2 * s * w * q + exact * w * (q + 2 * k)  # gradients of the block's sum and output, of q, k and v
    if mode in ("gather", "torch"):
        attention = s * w * 2 * q + exact * w * (q + 2 * stack.all_keys) + 4 * w * 2 * (stack.all_keys + k)
    elif mode in ("ring", "hybrid"):
        attention += 4 * w * (q + 3 * 2 * k)  # the sum for q; a block's gradient, that of others, and what travels
    return block + max(feed_forward, attention - freed)
