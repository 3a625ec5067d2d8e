"""Run a function on N real gloo ranks: `run_ranks(function, 3, arguments...)`."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` in `world` new processes that share a gloo group.

    Returns what each rank returned, in rank order. The function must be importable (no lambda).
    The processes are forked from a server that has imported torch and done nothing with it: they start in no time.
    """
    multiprocessing.set_forkserver_preload(["sfm.train.step", "sfm.parallel.fsdp"])
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank, (world, folder, function, arguments), nprocs=world, join=False, start_method="forkserver"
        )
        while not context.join():
            pass
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        torch.save(function(*arguments), Path(folder, str(rank)))
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        dist.destroy_process_group()
