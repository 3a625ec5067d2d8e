"""One batch on one device or cut into slabs over context-parallel ranks: same loss, same gradients."""

import numpy as np
import torch

from sfm.model import blocks, mae
from sfm.model.masking import draw_mask
from sfm.parallel.compiled import compile_blocks
from sfm.parallel.context import attends
from sfm.parallel.engines import build_engine
from sfm.parallel.mesh import build_mesh
from sfm.plan.shares import slab_rows
from sfm.spec import parse_spec
from sfm.train.step import MicroBatch, run_step


def spec_of(rows, parallel=None, **model):
    """A small job over `rows` patch rows, with these fields of the model and of `parallel`."""
    sizes = {
        "encoder": {"width": 36, "depth": 2, "heads": 3, "mlp": 50},
        "decoder": {"width": 24, "depth": 2, "heads": 2, "mlp": 30},
    }
    return parse_spec(
        {
            "surveys": [{"url": "unused"}],
            "window": {"shape": [2 * rows, 9, 10]},
            "model": {"preset": "tiny", "patch": [2, 3, 2], **sizes, **model},
            "mask": {"ratio": 0.55},
            "parallel": parallel or {},
        }
    )


def slab(spec, rows):
    """The part of a batch of two windows in patch `rows`: voxels with a dead trace, visible and masked tokens."""
    voxels = np.random.default_rng(3).normal(size=(2, *spec.window.shape))
    voxels[:, 2, 4, :] = np.nan
    thickness = spec.model.patch[0]
    part = torch.from_numpy(voxels[:, rows.start * thickness : rows.stop * thickness])
    masks = [draw_mask(spec.grid, spec.mask_ratio, 0, index, rows, spec.model.decode_share) for index in range(2)]
    visible, masked = (torch.from_numpy(np.stack(part)) for part in zip(*masks, strict=True))
    return part, visible, masked


def loss_and_gradients(spec, mesh=None, dtype=torch.float64):
    """Loss and parameter gradients of one batch, computed in `dtype` and summed over the slabs in fp64; without a mesh,
    of whole windows."""
    rows, attention = range(spec.grid[0]), {}
    if mesh is not None:
        rows = slab_rows(spec.grid[0], mesh.context, mesh.context_rank)
        attend = attends(mesh, spec)
        attention = {"attend_encoder": attend.encoder, "attend_decoder": attend.decoder, "registers": attend.registers}
    model = mae.MaskedAutoencoder.from_spec(spec).to(dtype)
    voxels, *tokens = slab(spec, rows)
    loss = model(voxels.to(torch.promote_types(dtype, torch.float32)), *tokens, first_row=rows.start, **attention)
    loss.backward()
    parts = [loss.detach().double(), *(p.grad.double() for p in model.parameters())]
    if mesh is not None:
        flat = torch.cat([part.flatten() for part in parts])
        torch.distributed.all_reduce(flat)
        parts = [whole.view_as(part) for whole, part in zip(flat.split([p.numel() for p in parts]), parts, strict=True)]
    return parts


def over(spec, degree):
    """`spec` with its windows cut into so many slabs."""
    return spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"workers": degree, "context": degree})})


def over_slabs(specs, dtype=torch.float64):
    """Run by every rank: `loss_and_gradients` of each spec, its windows cut over all ranks in the spec's mode."""
    world = torch.distributed.get_world_size()
    specs = [over(spec, world) for spec in specs]
    meshes = {degree: build_mesh(world, degree) for degree in sorted({spec.parallel.ulysses for spec in specs})}
    return [loss_and_gradients(spec, meshes[spec.parallel.ulysses], dtype) for spec in specs]


def take_steps(specs, tile):
    """Run by every rank: for each spec, losses of two steps with its engine, all that is tiled in tiles of `tile` tokens."""
    mae.HEAD_TILE = blocks.HIDDEN_TILE = tile
    losses = []
    for spec in specs:
        mesh = build_mesh(spec.parallel.context)
        rows = slab_rows(spec.grid[0], mesh.context, mesh.context_rank)
        voxels, visible, masked = slab(spec, rows)
        batch = MicroBatch(voxels.float(), visible, masked)
        model = mae.MaskedAutoencoder.from_spec(spec)
        if spec.model.compile_blocks:
            compile_blocks(model)
        engine = build_engine(model, spec)
        attend = attends(mesh, spec)
        losses.append([run_step(engine, [batch], 1e-2, spec.model.patch, attend, rows.start).loss for _ in range(2)])
    return losses
