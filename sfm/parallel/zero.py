"""DeepSpeed ZeRO behind the engine interface."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import utils
from torch import Tensor, nn

from sfm.parallel.engines import MOMENTS, Engine, Resume, State, adamw
from sfm.plan.engines import PERSISTENT, bucket
from sfm.spec import JobSpec

_STAGE = {"zero1": 1, "zero2": 2, "zero3": 3}


class ZeroEngine(Engine):
    """DeepSpeed ZeRO stage 1, 2 or 3 over all ranks (Rajbhandari et al. 2020)."""

    def __init__(self, model: nn.Module, spec: JobSpec, resume: Resume | None) -> None:
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
            # By default stage 3 keeps up to 10^9 gathered weights for their next use, and so shards no smaller model.
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": bucket(spec),
                "allgather_bucket_size": bucket(spec),
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
                "stage3_param_persistence_threshold": PERSISTENT,
            },
            "bf16": {"enabled": spec.precision == "bf16"},
            "communication_data_type": "fp32",  # sums over many ranks lose too much in bf16
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
        self._link_moments()
        named = dict(self.engine.module.named_parameters())
        weights = {name: utils.safe_get_full_fp32_param(p).cpu() for name, p in named.items()}
        moments = {m: {n: utils.safe_get_full_optimizer_state(p, m).cpu() for n, p in named.items()} for m in MOMENTS}
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
