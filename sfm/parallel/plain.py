"""Data parallelism without sharding: the engine the others are measured against."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sfm.parallel.engines import MOMENTS, Engine, Resume, State, adamw
from sfm.spec import JobSpec


class PlainEngine(Engine):
    """Every rank holds everything; gradients are averaged in one all-reduce. The oracle of the others.

    In bf16, `model` is a working copy: gradients are summed, and weights and moments kept, in fp32.
    """

    def __init__(self, model: nn.Module, spec: JobSpec, resume: Resume | None) -> None:
        self.model, self.master = model, model
        if spec.precision == "bf16":
            self.master = copy.deepcopy(model)
            model.bfloat16()
        self.clip = spec.optimiser.clip_norm or float("inf")
        self.optimiser = adamw(self.master, spec.optimiser)
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        if resume is not None:
            for name, p in self.master.named_parameters():
                moments = {m: resume.state[m][name].to(p, copy=True) for m in MOMENTS}
                self.optimiser.state[p] = {"step": torch.tensor(float(resume.steps)), **moments}

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        if self.master is not self.model:
            for p, master in zip(self.model.parameters(), self.master.parameters(), strict=True):
                if p.grad is not None:
                    master.grad = p.grad.float() if master.grad is None else master.grad + p.grad
                    p.grad = None

    def step(self, lr: float) -> float:
        gradients = [p.grad for p in self.master.parameters() if p.grad is not None]
        if self.world > 1:
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat)
            flat /= self.world
            for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(mean.view_as(gradient))
        norm = nn.utils.clip_grad_norm_(self.master.parameters(), self.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        self.optimiser.zero_grad()
        if self.master is not self.model:
            self.model.load_state_dict(self.master.state_dict())
        return norm.item()

    def state(self) -> State:
        named = dict(self.master.named_parameters())
        weights = {name: p.detach().cpu() for name, p in named.items()}
        moments = {m: {name: self.optimiser.state[p][m].cpu() for name, p in named.items()} for m in MOMENTS}
        return {"weights": weights, **moments}
