"""Compiled blocks compute what blocks compute."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from sfm.model import blocks
from sfm.model.mae import MaskedAutoencoder
from sfm.parallel.compiled import compile_blocks
from sfm.spec import Parallel
from tests.distributed import run_ranks
from tests.model.slabs import spec_of, take_steps
from tests.model.test_mae import make_spec, windows


def step(model, batch):
    model.zero_grad()
    loss = model(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_loss_and_gradients_are_the_same_and_blocks_share_graphs(again, monkeypatch):
    monkeypatch.setattr(blocks, "HIDDEN_TILE", 7)  # several tiles, where blocks are computed again
    spec = make_spec(positions="rope", checkpoint_activations=again)
    model, batch = MaskedAutoencoder.from_spec(spec).double(), windows(spec, 2)
    names, expected = list(model.state_dict()), step(model, batch)
    torch.compiler.reset()
    counters.clear()
    compile_blocks(model)
    found, graphs = step(model, batch), counters["stats"]["unique_graphs"]
    assert graphs > 0
    for part, right in zip(found, expected, strict=True):
        torch.testing.assert_close(part, right, rtol=1e-10, atol=1e-12)
    step(model, batch)
    assert counters["stats"]["unique_graphs"] == graphs  # nothing is compiled twice
    assert graphs <= 5  # the probe, and two stacks of one or two pieces each; there are three blocks
    assert list(model.state_dict()) == names


@pytest.mark.slow
def test_engines_train_compiled_blocks_whose_attention_crosses_ranks():
    """Slabs of two and three patch rows, recomputed, sharded by the engine."""
    sizes = {name: {"width": 24, "depth": 2, "heads": 2, "mlp": 30} for name in ("encoder", "decoder")}
    spec = spec_of(5, positions="rope", checkpoint_activations=True, **sizes)
    spec = spec.model_copy(update={"batch": spec.batch.model_copy(update={"size": 2})})
    compiled = spec.model.model_copy(update={"compile_blocks": True})
    plain = spec.model_copy(update={"parallel": Parallel(engine="ddp")})
    across = [
        Parallel(workers=2, context=2, context_mode=mode, engine=engine)
        for mode, engine in (("gather", "ddp"), ("ring", "zero2"), ("ulysses", "fsdp2"))
    ]
    expected = run_ranks(take_steps, 1, [plain], 10**6)[0][0]
    specs = [spec.model_copy(update={"model": compiled, "parallel": parallel}) for parallel in across]
    for by_engine in run_ranks(take_steps, 2, specs, 10**6):
        for losses in by_engine:
            assert losses == pytest.approx(expected, rel=1e-5)


def test_a_machine_without_a_compiler_is_told_so(tmp_path):
    program = (
        "import torch; from sfm.parallel.compiled import compile_blocks\n"
        "try: compile_blocks(torch.nn.Linear(2, 2))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    environment = {**os.environ, "CXX": "/no/such/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.startswith("CompileError model.compile_blocks: torch.compile does not work here"), done
    assert "set model.compile_blocks false" in done.stdout
