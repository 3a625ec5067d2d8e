"""The 3D masked autoencoder (He et al. 2022), for one window or for one slab of it.

A device holds a slab: whole patch rows of the window along inline. On one device the slab is the window.
NaN marks voxels without data; they are zero to the encoder and absent from the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sfm.model.blocks import Attend, Memory, Rotation, Stack, attend_local
from sfm.model.patches import Grid, gather_patches
from sfm.model.positions import rotary, sincos
from sfm.plan.tiles import HEAD_TILE
from sfm.spec import JobSpec, Model

Error = Callable[[Tensor, Tensor], Tensor]
"""(prediction [B, n, P] of a tile of tokens, those tokens [B, n]) -> a scalar."""


class Scale(NamedTuple):
    """Mean and deviation of each patch, [B, M, 1], taken off its target where patches are normalised."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, patches: Tensor) -> Scale:
        """Statistics over the live voxels of [B, M, P]; a patch without any has NaN."""
        mean = patches.nanmean(-1, keepdim=True)
        variance = (patches - mean).square().nanmean(-1, keepdim=True)
        return cls(mean, (variance + 1e-6).sqrt())

    @classmethod
    def none(cls, patches: Tensor) -> Scale:
        """The scale that changes nothing."""
        one = patches.new_ones(*patches.shape[:2], 1)
        return cls(torch.zeros_like(one), one)

    def apply(self, amplitudes: Tensor) -> Tensor:
        return (amplitudes - self.mean) / self.deviation

    def invert(self, values: Tensor) -> Tensor:
        return values * self.deviation + self.mean


def masked_live(voxels: Tensor, masked: Tensor, patch: tuple[int, int, int], first_row: int = 0) -> Tensor:
    """Scalar int64: voxels with data in the `masked` patches of [B, I, X, T]."""
    counts = []
    for row in voxels.split(patch[0], dim=1):  # [B, pi, X, T]: only its own flags are held, not the window's
        live = row.eq(row).sum(1, dtype=torch.int16)  # [B, X, T]; first along inline, in the fewest bytes
        live = live.unflatten(2, (-1, patch[2])).unflatten(1, (-1, patch[1]))  # [B, gx, px, gt, pt]
        counts.append(live.sum((2, 4)).flatten(1))  # [B, gx gt]
    per_patch = torch.cat(counts, dim=1)  # [B, tokens of the slab]
    before = first_row * counts[0].shape[1]
    return per_patch.gather(1, masked - before).sum()


def targets(
    voxels: Tensor, masked: Tensor, patch: tuple[int, int, int], first_row: int = 0, *, normalise: bool
) -> tuple[Tensor, Scale]:
    """What the prediction of `masked` patches should be: [B, M, P], NaN where there is no data, and the scale it is in."""
    amplitudes = gather_patches(voxels, masked, patch, first_row)
    if not normalise:
        return amplitudes, Scale.none(amplitudes)
    scale = Scale.of(amplitudes)
    return scale.apply(amplitudes), scale


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Scalar: sum of squared differences where `target` has data, in at least float32."""
    exact = torch.promote_types(prediction.dtype, torch.float32)
    prediction, target = prediction.to(exact), target.to(exact)
    # Each pass over so many voxels costs as much as a block of a small model: where there is no data, the target is
    # the prediction itself, and one kernel does the rest.
    return F.mse_loss(prediction, torch.where(target.isnan(), prediction.detach(), target), reduction="sum")


class Head(nn.Linear):
    """Predicts the voxels of each token.

    The tiles are inside of the module, where an engine that shards weights has gathered them once: ranks whose slabs
    differ in length have different numbers of tiles, and may not call a module at different counts.
    """

    def forward(self, x: Tensor, error: Error | None = None, tokens: Tensor | None = None) -> Tensor:
        """[B, M, C] -> [B, M, P], or the sum of `error(prediction, tokens)` over tiles of `tokens` [B, M].

        Where there are several tiles, each one's prediction is forgotten and made again in the backward pass.
        """
        if error is None or tokens is None:
            return super().forward(x)

        def of_tile(x: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return error(F.linear(x, weight.to(x.dtype), bias.to(x.dtype)), tokens)

        length = max(1, HEAD_TILE // len(x))
        tiles = list(zip(x.split(length, dim=1), tokens.split(length, dim=1), strict=True))
        if len(tiles) == 1 or not torch.is_grad_enabled():
            return torch.stack([of_tile(*tile, self.weight, self.bias) for tile in tiles]).sum()
        # The gradients of the weights are summed over the tiles in at least float32, and rounded once.
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        weights = self.weight.to(exact), self.bias.to(exact)
        errors = [checkpoint(of_tile, *tile, *weights, use_reentrant=False, preserve_rng_state=False) for tile in tiles]
        return torch.stack(errors).sum()


class MaskedAutoencoder(nn.Module):
    """Encoder over visible tokens; decoder that rebuilds the masked ones; a linear head that predicts voxels.

    The decoder's blocks attend among visible and masked tokens, or (`decoder_attention: cross`) masked tokens attend
    to the encoder's output alone: nothing then depends on which other masked tokens are predicted, nor on how many.

    Registers are learnt tokens that go through both stacks with the visible ones and are dropped at the end (the first
    of them is a class token); they belong to no patch, have no position, and each is on one device.

    Args:
        model: sizes, patch and positions.
        grid: patches of a whole window along (inline, crossline, sample).
    """

    def __init__(self, model: Model, grid: Grid) -> None:
        super().__init__()
        self.patch, self.grid = model.patch, grid
        self.positions, self.normalise = model.positions, model.normalise_patches
        enc, dec = model.encoder_size, model.decoder_size
        volume = math.prod(model.patch)
        self.cross = model.decoder_attention == "cross"
        memory = {
            "recompute": model.checkpoint_activations,
            "keep_attention": model.keep_attention,
            "offload": model.offload_activations,
        }
        self.embed = nn.Linear(volume, enc.width)
        self.encoder = Stack(enc, qk_norm=model.qk_norm, **memory)
        self.bridge = nn.Linear(enc.width, dec.width)
        self.mask_token = nn.Parameter(torch.empty(dec.width))
        self.registers = nn.Parameter(torch.empty(model.registers, enc.width)) if model.registers else None
        self.decoder = Stack(dec, qk_norm=model.qk_norm, cross=self.cross, **memory)
        self.head = Head(dec.width, volume)
        self._head_widths = enc.width // enc.heads, dec.width // dec.heads

    @classmethod
    def from_spec(cls, spec: JobSpec) -> MaskedAutoencoder:
        """Build and initialise the model of a job: the same weights on every rank for the same seed."""
        model = cls(spec.model, spec.grid)
        model.initialise(spec.seed)
        return model

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw the weights: Xavier-uniform matrices, zero biases, mask token and registers of deviation 0.02."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, generator=generator)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.mask_token, std=0.02, generator=generator)
        if self.registers is not None:
            nn.init.normal_(self.registers, std=0.02, generator=generator)

    def decode(
        self,
        voxels: Tensor,
        visible: Tensor,
        masked: Tensor,
        *,
        first_row: int = 0,
        attend_encoder: Attend = attend_local,
        attend_decoder: Attend = attend_local,
        registers: slice = slice(None),
    ) -> Tensor:
        """What the decoder makes of the masked patches of this slab.

        Args:
            voxels: [B, I, X, T] normalised amplitudes, NaN without data: the slab from patch row `first_row` on.
            visible: [B, V] int64 visible tokens of the slab (numbered over the whole window).
            masked: [B, M] int64 the others; with a cross-attention decoder any of them.
            attend_encoder, attend_decoder: attention over all devices that share the window.
            registers: those this device holds; of the devices that share the window each holds others.

        Returns:
            [B, M, C'] for the head.
        """
        dtype = self.embed.weight.dtype
        patches = gather_patches(voxels, visible, self.patch, first_row).nan_to_num_(0.0)  # [B, V, P]
        x = self.embed(patches.to(dtype))  # [B, V, C]
        if self.registers is not None:  # also where this device holds none: every device has a gradient for them
            own = self.registers[registers].to(dtype)  # [R, C]
            x = torch.cat([own.expand(len(x), -1, -1), x], dim=1)  # [B, R + V, C]
        x, rotation = self._place(x, visible, 0)
        x = self.bridge(self.encoder(x, rotation, attend_encoder))  # [B, R + V, C']

        hidden = self.mask_token.to(dtype).expand(*masked.shape, -1)  # [B, M, C']
        if self.cross:
            memory = Memory(*self._place(x, visible, 1))
            x, rotation = self._place(hidden, masked, 1)
            return self.decoder(x, rotation, attend_decoder, memory)
        x = torch.cat([x, hidden], dim=1)  # attention has no order: registers first, then visible, then masked
        x, rotation = self._place(x, torch.cat([visible, masked], dim=1), 1)
        x = self.decoder(x, rotation, attend_decoder)
        return x[:, x.shape[1] - masked.shape[1] :]

    def forward(
        self,
        voxels: Tensor,
        visible: Tensor,
        masked: Tensor,
        *,
        first_row: int = 0,
        attend_encoder: Attend = attend_local,
        attend_decoder: Attend = attend_local,
        registers: slice = slice(None),
        predict: bool = False,
        error: Error | None = None,
    ) -> Tensor:
        """Sum of squared errors over the masked live voxels of this slab, or with `predict` the prediction.

        Other arguments as in :meth:`decode`. The caller owns the division of the sum, by the count of such
        voxels over all devices (:func:`masked_live`). Engines hook in here: call the module, not its methods.

        Args:
            predict: return the whole prediction.
            error: what to sum in place of squared errors; without gradients it sees every masked token once.

        Returns:
            a scalar in at least float32, or [B, M, P] in the target's units, or per-patch normalised ones.
        """
        x = self.decode(
            voxels,
            visible,
            masked,
            first_row=first_row,
            attend_encoder=attend_encoder,
            attend_decoder=attend_decoder,
            registers=registers,
        )
        if predict:
            return self.head(x)

        def squared(prediction: Tensor, tokens: Tensor) -> Tensor:
            target, _ = targets(voxels, tokens, self.patch, first_row, normalise=self.normalise)
            return squared_error(prediction, target)

        return self.head(x, error or squared, masked)

    def _place(self, x: Tensor, tokens: Tensor, stack: int) -> tuple[Tensor, Rotation]:
        """Tell the last of the tokens `x` where they are: add codes, or return the rotation for queries and keys.

        What stands before them in `x`, registers, has no place: nothing is added to it, and it is not rotated.
        """
        registers = x.shape[1] - tokens.shape[1]
        if self.positions == "rope":
            cos, sin = rotary(tokens, self.grid, self._head_widths[stack], x.dtype)
            return x, (_after(registers, cos, 1.0), _after(registers, sin, 0.0))
        return x + _after(registers, sincos(tokens, self.grid, x.shape[-1], x.dtype), 0.0), None


def _after(count: int, x: Tensor, value: float) -> Tensor:
    """[..., N, C] behind `count` rows of `value`: [..., count + N, C]."""
    return F.pad(x, (0, 0, count, 0), value=value) if count else x
