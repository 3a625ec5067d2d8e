"""What ranks tell each other beside the training step."""

import torch
import torch.distributed as dist

from sfm.train.step import CPU, of_every_rank
from tests.distributed import run_ranks


def told():
    rank = dist.get_rank()
    return of_every_rank([rank + 0.1, -float(rank), 1e15 + rank], CPU)


def test_every_rank_knows_what_each_says():
    expected = torch.tensor([[rank + 0.1, -float(rank), 1e15 + rank] for rank in range(3)], dtype=torch.float64)
    for found in run_ranks(told, 3):
        assert torch.equal(found, expected)


def test_one_process_has_only_itself():
    assert of_every_rank([1.5, 2.0], CPU).tolist() == [[1.5, 2.0]]
