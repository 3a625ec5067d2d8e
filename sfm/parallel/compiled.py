"""Compiling blocks (torch.compile): what lies between matrix products becomes few passes over memory instead of many.

The order of the wrappers is: recompute, compile, shard. A block that is computed again calls its compiled self, and an
engine hooks into what it calls. All blocks of a stack share their graphs. Shapes are fixed, so graphs are made for
them alone. Attention over several devices stays outside of the graphs: to a compiler it is one opaque call.
"""

from __future__ import annotations

import torch
from torch import nn

from sfm.model.blocks import Block
from sfm.spec import SfmError


class CompileError(SfmError):
    """Blocks cannot be compiled on this machine."""


def compile_blocks(model: nn.Module) -> None:
    """Have every block of `model`, which is on its device, compiled when it is first called. Names stay as they are.

    Raises:
        CompileError: this machine cannot compile for that device.
    """
    device = next(model.parameters()).device
    try:
        torch.compile(_probe, dynamic=False)(torch.ones(8, device=device))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        needs = "Triton and a C compiler" if device.type == "cuda" else "a C++ compiler (g++, or what CXX names)"
        raise CompileError(
            f"model.compile_blocks: torch.compile does not work here ({reason}); it needs {needs} on every worker: "
            f"install that, or set model.compile_blocks false"
        ) from error
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(dynamic=False)


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1
