"""How many bytes of tensors are alive while something runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages made inside of it. What a kernel takes and gives back within one operation is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self.at = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self.alive[storage._cdata] = StorageWeakRef(storage)
        now = self.now
        if now > self.peak:
            self.peak, self.at = now, str(func)
        return result

    @property
    def now(self) -> int:
        """Bytes alive, at the size that each storage has by now: some are emptied long before they go."""
        total = 0
        for key, reference in list(self.alive.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # None once it is gone
            if storage is None:
                del self.alive[key]
            else:
                total += storage.nbytes()
        return total
