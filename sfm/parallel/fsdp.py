"""PyTorch's fully sharded data parallelism (FSDP2, `fully_shard`) behind the engine interface."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from sfm.model.blocks import Block
from sfm.parallel.engines import MOMENTS, Engine, Resume, State, adamw
from sfm.spec import JobSpec


class FsdpEngine(Engine):
    """Weights, gradients and moments sharded over all ranks; a block is gathered when it is computed (Zhao et al. 2023).

    Weights are kept in fp32 and gathered in the precision of the pass; gradients are summed in fp32.
    """

    def __init__(self, model: nn.Module, spec: JobSpec, resume: Resume | None) -> None:
        device = next(model.parameters()).device.type
        mesh = init_device_mesh(device, (dist.get_world_size(),))  # over it FSDP averages, as the rule has it
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if spec.precision == "bf16" else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # amplitudes are also the target; the model casts what it computes with
        )
        for module in model.modules():
            if isinstance(module, Block):
                fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.model = model
        # The shards by name: while something is gathered, the model shows the whole tensors in their place.
        self.shards = {name: cast(DTensor, p) for name, p in model.named_parameters()}
        self.accumulation, self.micro_batch = spec.accumulation, 0
        self.clip = spec.optimiser.clip_norm or float("inf")
        self.optimiser = adamw(model, spec.optimiser)
        if resume is not None:
            for name, p in self.shards.items():
                moments = {m: _part(resume.state[m][name], p) for m in MOMENTS}
                self.optimiser.state[p] = {"step": torch.tensor(float(resume.steps)), **moments}

    def backward(self, loss: Tensor) -> None:
        self.micro_batch += 1
        last = self.micro_batch == self.accumulation
        cast(FSDPModule, self.model).set_requires_gradient_sync(last)  # until then each rank keeps its own sum, whole
        loss.backward()

    def step(self, lr: float) -> float:
        norm = nn.utils.clip_grad_norm_(self.shards.values(), self.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.micro_batch = 0
        return cast(DTensor, norm).full_tensor().item()

    def state(self) -> State:
        weights = {name: _whole(p.detach()) for name, p in self.shards.items()}
        moments = {m: {name: _whole(self.optimiser.state[p][m]) for name, p in self.shards.items()} for m in MOMENTS}
        return {"weights": weights, **moments}


def _part(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a tensor that every rank holds whole; sends nothing."""
    part = distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return part.clone()  # what is split off is a view, which would hold the whole in memory


def _whole(shard: Tensor) -> Tensor:
    """Gather a sharded tensor on the CPU of every rank."""
    return cast(DTensor, shard).full_tensor().cpu()
