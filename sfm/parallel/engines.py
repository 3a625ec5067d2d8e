"""Who holds gradients and optimiser state: interchangeable engines behind one interface.

One rule keeps them equal: every rank hands over `sum of its errors * world / count over the world`, the
engine averages gradients over one flat group of all ranks (data x context), and is told nothing of context
parallelism. The average is then the gradient of the global mean, whatever the degrees.

Each engine is a file of its own: :mod:`sfm.parallel.plain`, :mod:`sfm.parallel.zero`, :mod:`sfm.parallel.fsdp`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sfm.spec import JobSpec, Optimiser

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state per parameter, as torch names it

State = dict[str, dict[str, Tensor]]
"""{"weights" | moment: {parameter name: fp32 tensor of the full shape, on the CPU}}"""


class Resume(NamedTuple):
    """Training state to begin from."""

    state: State
    """Whole on every rank."""
    steps: int
    """Optimiser steps it has behind it."""


def adamw(model: nn.Module, options: Optimiser) -> torch.optim.AdamW:
    """AdamW over two groups: matrices decay, vectors (biases, norms, mask token, registers) do not."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        (matrices if p.ndim > 1 and name != "registers" else vectors).append(p)
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # On CPUs torch's default makes some ten passes over weights, gradients and moments, its fused kernel one. On GPUs
    # the default is quick, and the kernel would want the count of steps, which engines restore, on the device too.
    fused = all(p.device.type == "cpu" for p in model.parameters())
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=fused or None)


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
        """Weights and moments, whole, fp32, on the CPU of every rank. Collective; after at least one step.

        Read it before the next step: on CPUs it may share memory with what the engine trains.
        """


def build_engine(model: nn.Module, spec: JobSpec, resume: Resume | None = None) -> Engine:
    """Wrap `model` (on its device, in fp32) in the engine that `spec` names, continuing from `resume`. Collective."""
    if resume is not None:
        model.load_state_dict(resume.state["weights"])
    # Imported when chosen: DeepSpeed is slow to import, and the others do without it.
    if spec.parallel.engine == "ddp":
        from sfm.parallel.plain import PlainEngine

        return PlainEngine(model, spec, resume)
    if spec.parallel.engine == "fsdp2":
        from sfm.parallel.fsdp import FsdpEngine

        return FsdpEngine(model, spec, resume)
    from sfm.parallel.zero import ZeroEngine

    return ZeroEngine(model, spec, resume)
