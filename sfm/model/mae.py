"""The 3D masked autoencoder (He et al. 2022), for one window or for one slab of it.

A device holds a slab: whole patch rows of the window along inline. On one device the slab is the window.
NaN marks voxels without data; they are zero to the encoder and absent from the loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from sfm.model.blocks import Attend, Memory, Rotation, Stack, attend_local
from sfm.model.patches import Grid, gather_patches, patch_volume
from sfm.model.positions import rotary, sincos
from sfm.spec import JobSpec, Model


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
    return (~gather_patches(voxels.isnan(), masked, patch, first_row)).sum()


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Scalar: sum of squared differences where `target` has data, in at least float32."""
    exact = torch.promote_types(prediction.dtype, torch.float32)
    error = prediction.to(exact) - target.nan_to_num(0.0).to(exact)
    return (error.square() * ~target.isnan()).sum()


class MaskedAutoencoder(nn.Module):
    """Encoder over visible tokens; decoder that rebuilds the masked ones; a linear head that predicts voxels.

    The decoder's blocks attend among visible and masked tokens, or (`decoder_attention: cross`) masked tokens attend
    to the encoder's output alone: nothing then depends on which other masked tokens are predicted, nor on how many.

    Args:
        model: sizes, patch and positions.
        grid: patches of a whole window along (inline, crossline, sample).
    """

    def __init__(self, model: Model, grid: Grid) -> None:
        super().__init__()
        self.patch, self.grid = model.patch, grid
        self.positions, self.normalise = model.positions, model.normalise_patches
        enc, dec = model.encoder_size, model.decoder_size
        volume = patch_volume(model.patch)
        self.cross = model.decoder_attention == "cross"
        recompute = model.checkpoint_activations
        self.embed = nn.Linear(volume, enc.width)
        self.encoder = Stack(enc, qk_norm=model.qk_norm, recompute=recompute)
        self.bridge = nn.Linear(enc.width, dec.width)
        self.mask_token = nn.Parameter(torch.empty(dec.width))
        self.decoder = Stack(dec, qk_norm=model.qk_norm, cross=self.cross, recompute=recompute)
        self.head = nn.Linear(dec.width, volume)
        self._head_widths = enc.width // enc.heads, dec.width // dec.heads

    @classmethod
    def from_spec(cls, spec: JobSpec) -> MaskedAutoencoder:
        """Build and initialise the model of a job: the same weights on every rank for the same seed."""
        model = cls(spec.model, spec.grid)
        model.initialise(spec.seed)
        return model

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw the weights: Xavier-uniform matrices, zero biases, mask token of deviation 0.02."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, generator=generator)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.mask_token, std=0.02, generator=generator)

    def predict(
        self,
        voxels: Tensor,
        visible: Tensor,
        masked: Tensor,
        *,
        first_row: int = 0,
        attend_encoder: Attend = attend_local,
        attend_decoder: Attend = attend_local,
    ) -> Tensor:
        """Predict the masked patches of this slab.

        Args:
            voxels: [B, I, X, T] normalised amplitudes, NaN without data: the slab from patch row `first_row` on.
            visible: [B, V] int64 visible tokens of the slab (numbered over the whole window).
            masked: [B, M] int64 the others; with a cross-attention decoder any of them.
            attend_encoder, attend_decoder: attention over all devices that share the window. A cross-attention
                decoder uses the encoder's: its keys are the visible tokens.

        Returns:
            [B, M, P]; in the target's units, or per-patch normalised ones.
        """
        dtype = self.embed.weight.dtype
        patches = gather_patches(voxels, visible, self.patch, first_row).nan_to_num(0.0)  # [B, V, P]
        x = self.embed(patches.to(dtype))  # [B, V, C]
        x, rotation = self._place(x, visible, 0)
        x = self.bridge(self.encoder(x, rotation, attend_encoder))  # [B, V, C']

        hidden = self.mask_token.to(dtype).expand(*masked.shape, -1)  # [B, M, C']
        if self.cross:
            memory = Memory(*self._place(x, visible, 1))
            x, rotation = self._place(hidden, masked, 1)
            return self.head(self.decoder(x, rotation, attend_encoder, memory))  # [B, M, P]
        x = torch.cat([x, hidden], dim=1)  # attention has no order: visible first, then masked
        x, rotation = self._place(x, torch.cat([visible, masked], dim=1), 1)
        x = self.decoder(x, rotation, attend_decoder)
        return self.head(x[:, visible.shape[1] :])  # [B, M, P]

    def target(self, voxels: Tensor, masked: Tensor, first_row: int = 0) -> tuple[Tensor, Scale]:
        """What `predict` should give: [B, M, P], NaN where there is no data, and the scale it is in."""
        amplitudes = gather_patches(voxels, masked, self.patch, first_row)
        scale = Scale.of(amplitudes) if self.normalise else Scale.none(amplitudes)
        return scale.apply(amplitudes), scale

    def forward(
        self,
        voxels: Tensor,
        visible: Tensor,
        masked: Tensor,
        *,
        first_row: int = 0,
        attend_encoder: Attend = attend_local,
        attend_decoder: Attend = attend_local,
        predict: bool = False,
    ) -> Tensor:
        """Sum of squared errors over the masked live voxels of this slab, or with `predict` the prediction.

        Other arguments as in :meth:`predict`. The caller owns the division of the sum, by the count of such
        voxels over all devices (:func:`masked_live`). Engines hook in here: call the module, not its methods.

        Returns:
            a scalar in at least float32, or [B, M, P].
        """
        prediction = self.predict(
            voxels, visible, masked, first_row=first_row, attend_encoder=attend_encoder, attend_decoder=attend_decoder
        )
        if predict:
            return prediction
        target, _ = self.target(voxels, masked, first_row)
        return squared_error(prediction, target)

    def _place(self, x: Tensor, tokens: Tensor, stack: int) -> tuple[Tensor, Rotation]:
        """Tell tokens where they are: add codes, or return the rotation for queries and keys."""
        if self.positions == "rope":
            return x, rotary(tokens, self.grid, self._head_widths[stack], x.dtype)
        return x + sincos(tokens, self.grid, x.shape[-1], x.dtype), None
