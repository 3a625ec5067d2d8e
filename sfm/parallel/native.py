"""Context parallelism by PyTorch itself, whose ring of fused kernels serves attention of tensors sharded along tokens.

It is a prototype there: the names with an underscore below are what `torch.distributed.tensor.experimental` offers to
those who shard tensors on their own. Every rank must hold as many tokens as the others, and there are kernels for GPUs
only; on CPUs the plain formula is computed over gathered keys, for tests.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as implementation
from torch.nn.attention import SDPBackend, sdpa_kernel

_KERNELS = {
    # On a GPU the formula would hold the scores of all queries and keys: rather fail than fall back to it unseen. Of the
    # memory-efficient kernel, which would serve fp32, the ring cannot merge results: their sums are padded to 32 queries.
    "cuda": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION],
    "cpu": [SDPBackend.MATH],
}


class NativeAttend:
    """Attend with local queries to the keys and values of every rank of `group`, of which each holds as many."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.mesh: DeviceMesh | None = None
        # Balancing is for causal masks. By default it is on, and then attention without one is refused.
        implementation._cp_options.enable_load_balance = False
        # For the whole process and from now on, as backward passes, too, go by it. It concerns the attention of
        # DTensors, and those below are the only ones.
        implementation._enable_context_parallel_dispatcher()

    @torch.compiler.disable  # to a compiler, what is exchanged is one opaque call
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        device = q.device.type
        if self.mesh is None:
            self.mesh = DeviceMesh.from_group(self.group, device)
        q, k, v = (DTensor.from_local(x, self.mesh, [Shard(2)], run_check=False) for x in (q, k, v))
        with sdpa_kernel(_KERNELS[device]):
            out = F.scaled_dot_product_attention(q, k, v)
        assert isinstance(out, DTensor)
        return out.redistribute(placements=[Shard(2)]).to_local()  # on CPUs another sharding may come out
