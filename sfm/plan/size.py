"""Parameters and floating-point operations of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sfm.plan.shares import shares
from sfm.plan.tiles import HEAD_TILE, HIDDEN_TILE
from sfm.spec import JobSpec, Transformer


def block_tensors(size: Transformer, *, cross: bool = False, qk_norm: bool = False) -> list[int]:
    """Sizes of the parameter tensors of one pre-norm Transformer block: two norms, attention, feed-forward, all with
    bias; with `qk_norm` a gain per channel of a head for queries and one for keys."""
    w, m = size.width, size.mlp
    norms = [w] * 4
    inward = [w * w, w, 2 * w * w, 2 * w] if cross else [3 * w * w, 3 * w]
    gains = [w // size.heads] * 2 if qk_norm else []
    return [*norms, *inward, w * w, w, *gains, w * m, m, m * w, w]


def stack_tensors(spec: JobSpec) -> list[int]:
    """Sizes of the parameter tensors of all blocks of both stacks."""
    model = spec.model
    encoder = block_tensors(model.encoder_size, qk_norm=model.qk_norm) * model.encoder_size.depth
    cross = model.decoder_attention == "cross"
    return encoder + block_tensors(model.decoder_size, cross=cross, qk_norm=model.qk_norm) * model.decoder_size.depth


def other_tensors(spec: JobSpec) -> list[int]:
    """Sizes of the parameter tensors outside of blocks."""
    enc, dec, patch = spec.model.encoder_size.width, spec.model.decoder_size.width, math.prod(spec.model.patch)
    embed, bridge, head = [patch * enc, enc], [enc * dec, dec], [dec * patch, patch]
    norms, tokens = [enc, enc, dec, dec], [dec, spec.model.registers * enc]
    return [*embed, *bridge, *head, *norms, *tokens]


def parameters(spec: JobSpec) -> int:
    """Trainable parameters of the model that `spec` describes."""
    return sum(stack_tensors(spec)) + sum(other_tensors(spec))


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of matrix products for one sample, a multiplication and an addition counted as two."""

    encoder: int
    """Patch embedding and encoder, forward and backward."""
    decoder: int
    """Projection and decoder, forward and backward."""
    head: int
    """Prediction of voxels, forward and backward."""
    repeated: int
    """Forward passes made again because their results were not kept."""

    @property
    def model(self) -> int:
        """What the mathematics asks for: the numerator of a model FLOPs utilisation (Chowdhery et al. 2022)."""
        return self.encoder + self.decoder + self.head

    @property
    def hardware(self) -> int:
        """What is computed."""
        return self.model + self.repeated


def flops(spec: JobSpec) -> Flops:
    """Operations of a training step per sample, in closed form.

    A product of a [n, a] and a [a, b] matrix takes 2 n a b; its backward pass twice that (for the patch embedding
    once: voxels have no gradient). Attention of q queries to k keys over width C takes 4 q k C, twice that backward
    (a fused kernel's own second look at the scores is not counted). Norms, softmax and activations are left out.
    """
    enc, dec = spec.model.encoder_size, spec.model.decoder_size
    part, patch = shares(spec), math.prod(spec.model.patch)
    seen, known, predicted = spec.visible, sum(part.encoder), sum(part.predicted)
    queries, keys = sum(part.queries), sum(part.keys)

    embed = 2 * seen * patch * enc.width
    encoder = enc.depth * _block(enc, known, known)
    bridge = 2 * known * enc.width * dec.width
    decoder = dec.depth * _block(dec, queries, keys)
    head = 2 * predicted * patch * dec.width
    again = head if spec.micro_batch * max(part.predicted) > HEAD_TILE else 0
    if spec.model.checkpoint_activations:
        again += encoder + decoder
        if spec.model.keep_attention:
            again -= 4 * (enc.depth * known * known * enc.width + dec.depth * queries * keys * dec.width)
        for size, tokens, widest in ((enc, known, max(part.encoder)), (dec, queries, max(part.queries))):
            product = 2 * size.depth * tokens * size.width * size.mlp
            # The last product of a block is not repeated, as no gradient needs its result; but tiles are computed whole,
            # and the first product in them a third time.
            again += product if spec.micro_batch * widest > HIDDEN_TILE else -product
    return Flops(2 * embed + 3 * encoder, 3 * (bridge + decoder), 3 * head, again)


def _block(size: Transformer, queries: int, keys: int) -> int:
    """Forward pass of a block whose tokens attend to `keys` tokens, themselves or others."""
    w = size.width
    linear = 2 * w * (2 * queries * w + 2 * keys * w + 2 * queries * size.mlp)
    return linear + 4 * queries * keys * w
