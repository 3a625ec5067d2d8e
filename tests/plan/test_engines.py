"""What engines send for weights and gradients, counted on real processes, against the closed formula."""

from typing import get_args

import pytest

from sfm import plan
from sfm.feed.order import RankOrder
from sfm.model.mae import MaskedAutoencoder
from sfm.parallel.context import attends
from sfm.parallel.engines import build_engine
from sfm.parallel.mesh import build_mesh
from sfm.spec import Engine, parse_spec
from sfm.train.step import run_step
from tests.distributed import run_ranks
from tests.parallel.test_engines import micro_batch
from tests.traffic import Counter


def spec_of(world, engine, micro, precision):
    return parse_spec(
        {
            "surveys": [{"url": "unused"}],
            "window": {"shape": [8, 8, 16]},
            "model": {
                "preset": "tiny",
                "patch": [4, 4, 4],
                "encoder": {"width": 192, "depth": 2, "heads": 3, "mlp": 768},  # some tensors over 10^5 numbers
                "decoder": {"width": 96, "depth": 1, "heads": 3, "mlp": 384},
                "positions": "rope",
            },
            "batch": {"size": 3 * world, "micro": micro},
            "parallel": {"workers": world, "engine": engine},
            "precision": precision,
        }
    )


def sent_per_step(specs):
    """Bytes that this rank sends in the second step of each spec."""
    sent = []
    for spec in specs:
        engine = build_engine(MaskedAutoencoder.from_spec(spec), spec)
        mesh = build_mesh(1)
        order = RankOrder.of(spec, mesh.data_rank)
        rows = range(spec.grid[0])
        numbers = range(0, order.per_step, spec.micro_batch)
        batches = [micro_batch(spec, [order.sample(n + i) for i in range(spec.micro_batch)], rows) for n in numbers]
        for _ in range(2):
            with Counter() as counter:
                run_step(engine, batches, 1e-3, spec.model.patch, attends(mesh, spec), 0)
        sent.append(sum(counter.bytes))
    return sent


@pytest.mark.parametrize("world", [2, 3])
def test_every_engine_sends_what_the_formula_says(world):
    specs = [
        spec_of(world, engine, micro, precision)
        for engine in get_args(Engine)
        for micro in (3, 1)
        for precision in ("fp32", "bf16")
    ]
    for sent in run_ranks(sent_per_step, world, specs):
        for spec, found in zip(specs, sent, strict=True):
            # padding of shards, counts and norms are what the formula leaves out
            assert plan.engine_traffic(spec) == pytest.approx(found, rel=0.001), (spec.parallel.engine, spec.batch)
