"""Who holds gradients and optimiser state: interchangeable engines behind one interface.

One rule keeps them equal: every rank hands over `sum of its errors * world / count over the world`, the
engine averages gradients over one flat group of all ranks (data x context), and is told nothing of context
parallelism. The average is then the gradient of the global mean, whatever the degrees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sfm.spec import JobSpec, Optimiser

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state per parameter, as torch names it
_STAGE = {"zero1": 1, "zero2": 2, "zero3": 3}

State = dict[str, dict[str, Tensor]]
"""{"weights" | moment: {parameter name: fp32 tensor of the full shape, on the CPU}}"""


class Resume(NamedTuple):
    """Training state to begin from."""

    state: State
    """Whole on every rank."""
    steps: int
    """Optimiser steps it has behind it."""


def adamw(model: nn.Module, options: Optimiser) -> torch.optim.AdamW:
    """AdamW over two groups: matrices decay, vectors (biases, norms, mask token) do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)


class Engine(ABC):
    """One optimiser step = one `backward` per micro-batch, then `step`."""

    model: nn.Module
    """What to call for the loss."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` (already scaled by the rule above) to the step's."""

    @abstractmethod
    def step(self, lr: float) -> float:
        """Clip, update with learning rate `lr`, forget the gradients. Returns the global gradient norm before clipping."""

    @abstractmethod
    def state(self) -> State:
        """Weights and moments, whole, fp32, on the CPU of every rank. Collective; after at least one step."""


def build_engine(model: nn.Module, spec: JobSpec, resume: Resume | None = None) -> Engine:
    """Wrap `model` (on its device, in fp32) in the engine that `spec` names, continuing from `resume`. Collective."""
    if resume is not None:
        model.load_state_dict(resume.state["weights"])
    return (PlainEngine if spec.parallel.engine == "ddp" else ZeroEngine)(model, spec, resume)


class PlainEngine(Engine):
    """Every rank holds everything; gradients are averaged in one all-reduce. The oracle of the others."""

    def __init__(self, model: nn.Module, spec: JobSpec, resume: Resume | None) -> None:
        self.model = model
        self.clip = spec.optimiser.clip_norm or float("inf")
        self.optimiser = adamw(model, spec.optimiser)
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        if resume is not None:
            for name, p in model.named_parameters():
                moments = {m: resume.state[m][name].to(p, copy=True) for m in MOMENTS}
                self.optimiser.state[p] = {"step": torch.tensor(float(resume.steps)), **moments}

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, lr: float) -> float:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.world > 1:
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat)
            flat /= self.world
            for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(mean.view_as(gradient))
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        self.optimiser.zero_grad()
        return norm.item()

    def state(self) -> State:
        named = dict(self.model.named_parameters())
        weights = {name: p.detach().float().cpu() for name, p in named.items()}
        moments = {m: {name: self.optimiser.state[p][m].float().cpu() for name, p in named.items()} for m in MOMENTS}
        return {"weights": weights, **moments}


class ZeroEngine(Engine):
    """DeepSpeed ZeRO stage 1, 2 or 3 over all ranks (Rajbhandari et al. 2020)."""

    def __init__(self, model: nn.Module, spec: JobSpec, resume: Resume | None) -> None:
        import deepspeed  # slow to import, and other engines do without it

        # On CPUs DeepSpeed would compile a shared-memory all-reduce first, which needs a compiler on every node.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        world = dist.get_world_size()
        self.accumulation, self.micro_batch = spec.accumulation, 0
        self.stage = _STAGE[spec.parallel.engine]
        config: dict[str, Any] = {
            # Of the three batch fields only their agreement matters: the loss owns its scale.
            "train_micro_batch_size_per_gpu": spec.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "train_batch_size": spec.micro_batch * self.accumulation * world,
            "gradient_clipping": spec.optimiser.clip_norm,
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": spec.precision == "bf16"},
        }
        optimiser = adamw(model, spec.optimiser)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimiser, config=config, dist_init_required=False
        )
        self.model = self.engine
        if resume is not None:
            self._load(resume)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss * self.accumulation)  # DeepSpeed divides by the accumulation
        self.micro_batch += 1
        if self.micro_batch < self.accumulation:
            self.engine.step()  # updates nothing inside a step, but must be told of each micro-batch

    def step(self, lr: float) -> float:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        self.micro_batch = 0
        norm = self.engine.get_global_grad_norm()
        return float(norm)

    def state(self) -> State:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        self._link_moments()
        named = dict(self.engine.module.named_parameters())
        weights = {name: safe_get_full_fp32_param(p).cpu() for name, p in named.items()}
        moments = {m: {n: safe_get_full_optimizer_state(p, m).cpu() for n, p in named.items()} for m in MOMENTS}
        return {"weights": weights, **moments}

    def _load(self, resume: Resume) -> None:
        """Put fp32 master weights and moments in place; the working weights are there already."""
        zero = self.engine.optimizer
        flat = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        for p in flat:  # AdamW makes its state in its first step; ours must be there before
            moments = {m: torch.zeros_like(p) for m in MOMENTS}
            zero.optimizer.state[p] = {"step": torch.tensor(float(resume.steps)), **moments}
        self._link_moments()
        for name, p in self.engine.module.named_parameters():
            for key, tensors in resume.state.items():
                self._set(p, tensors[name], None if key == "weights" else key)

    def _set(self, p: nn.Parameter, value: Tensor, moment: str | None) -> None:
        """Write this rank's part of the master weight of `p`, or of one of its moments."""
        from deepspeed import utils

        if self.stage == 3:
            # DeepSpeed's setter of whole values fails where ranks do not divide the parameter; its local one does not.
            size, rank = p.partition_numel(), dist.get_rank()  # type: ignore[attr-defined]  # DeepSpeed adds it
            padded = nn.functional.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
            value = padded[rank * size : (rank + 1) * size]
            weight, state = utils.safe_set_local_fp32_param, utils.safe_set_local_optimizer_state
        else:
            weight, state = utils.safe_set_full_fp32_param, utils.safe_set_full_optimizer_state
        if moment is None:
            weight(p, value.to(p.device))
        else:
            state(p, value.to(p.device), moment)

    def _link_moments(self) -> None:
        """Let DeepSpeed find the moments of every parameter.

        Stages 1 and 2 link them once, after the first of several parameter groups was updated, when the
        other groups have none yet; so the link is made again.
        """
        if self.stage < 3:
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
