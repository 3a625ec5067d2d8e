"""Counts what this process sends, where torch dispatches it."""

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Counter(TorchDispatchMode):
    """Counts the operations of torch.distributed that this rank begins, and the bytes that leave it, pass by pass."""

    def __init__(self):
        super().__init__()
        self.operations, self.bytes = 0, [0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("c10d.") and not name.startswith("c10d.recv_"):
            self.operations += 1
            self.bytes[-1] += sent(name, args)
        return func(*args, **(kwargs or {}))


def sent(name, args):
    """Bytes that an operation takes to other ranks, by its arguments."""
    if name.startswith("c10d.barrier."):
        return 0
    group = {"send": 1, "allreduce_": 1, "broadcast_": 1}.get(name.split(".")[1], 2)
    size = dist.ProcessGroup.unbox(args[group]).size()
    if name.startswith("c10d.allreduce_."):  # reduced where each block belongs, then handed to all
        return 2 * args[0][0].nbytes * (size - 1) // size
    if name.startswith("c10d.broadcast_."):
        return args[0][0].nbytes  # at most: by the one that has it
    if name.startswith("c10d.send."):
        return args[0][0].nbytes
    if name.startswith("c10d._allgather_base_."):
        return args[1].nbytes * (size - 1)  # all of it to each of the others
    if name.startswith("c10d._reduce_scatter_base_."):
        return args[1].nbytes // size * (size - 1)  # to each its block
    if name.startswith("c10d.alltoall_base_."):
        rank = dist.ProcessGroup.unbox(args[2]).rank()
        return args[1].nbytes - args[4][rank] * args[1].element_size()  # but for what stays
    raise AssertionError(f"{name}: not counted yet")
