"""The benchmark of a GPU, at tiny sizes on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from sfm.model.blocks import attend_local
from sfm.parallel.context import attend_across

ROOT = Path(__file__).parents[2]

# Runs the benchmark where these cannot be imported.
ALONE = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "zarr", "mdio", "deepspeed", "fsspec", "s3fs", "fastapi", "matplotlib"):
            raise ImportError(f"{name} is not there")
sys.meta_path.insert(0, Refuse())
sys.argv = ["gpu.py", *sys.argv[1:]]
runpy.run_path("benchmarks/gpu.py", run_name="__main__")
"""


def test_it_runs_with_torch_alone_and_writes_what_it_prints(tmp_path):
    command = [sys.executable, "-c", ALONE, "--device", "cpu", "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "figures mean nothing" in found["label"]
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == found
    assert [record["engine"] for record in found["memory"]] == ["ddp", "zero1", "zero2", "zero3", "fsdp2"]
    for record in [*found["steps"], *found["longest"]]:
        assert record["tflops"] == pytest.approx(record["mfu_of_matmul"] * found["rates"][0]["tflops"])
        assert (record["hardware_tflops"] > record["tflops"]) == ("checkpoint_activations" in record["switched_on"])
    assert {(r["stack"], r["mode"]) for r in found["shares"]} >= {("encoder", "ring"), ("decoder", "gather")}
    assert all(r["efficiency"] == r["one_device_seconds"] / 8 / r["seconds"] for r in found["shares"])
    assert max(r["tokens"] for r in found["largest"]) == 256  # nothing runs out of memory, so the most that it tries


def test_without_a_gpu_it_says_what_to_do():
    command = [sys.executable, "benchmarks/gpu.py"]
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "no CUDA device: take --device cpu --small" in done.stderr


@pytest.mark.parametrize("mode", ["gather", "ring"])
def test_one_rank_without_the_others_computes_what_a_rank_computes(mode):
    """What arrives is what would be sent: eight times the same keys, over which attention is that over them once."""
    q, k, v = (torch.randn(1, 4, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    with gpu._alone(1) as mesh:
        found = attend_across(mesh, [6] * gpu.RANKS, mode)(q, k, v)
        (dq,) = torch.autograd.grad(found.sum(), q)
    expected = attend_local(q, k, v)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dq, torch.autograd.grad(expected.sum(), q)[0], rtol=1e-10, atol=1e-12)
