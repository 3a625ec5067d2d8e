"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from sfm.spec import Optimiser


def learning_rate(step: int, steps: int, options: Optimiser) -> float:
    """Rate of step `step` (from 0) of `steps`: linear from 0 over the warm-up, then a cosine down to `min_lr`."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    done = (step - options.warmup_steps) / max(1, steps - 1 - options.warmup_steps)
    return options.min_lr + (options.lr - options.min_lr) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
