"""Every attention kernel computes the formula: alone, over two merged blocks of keys, and backwards."""

import pytest
import torch
import torch.nn.functional as F

from sfm.parallel import kernels
from sfm.parallel.kernels import KERNELS, KernelError, Partial, merge

CPU = torch.device("cpu")


def tensors(dtype, device, width=64):
    """Queries, keys, values and the gradient of the output; lengths that nothing divides, keys unlike queries."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, n, width) for n in (517, 301, 301, 517)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device) for shape in shapes]


def in_blocks(name, dtype, device, split):
    """Output, log-sum-exp and input gradients, the keys in two blocks, the second from `split` on."""
    kernel = KERNELS[name]
    q, k, v, grad = tensors(dtype, device)
    blocks = [(k, v)] if split is None else [(k[:, :, :split], v[:, :, :split]), (k[:, :, split:], v[:, :, split:])]
    blocks = [(k.contiguous(), v.contiguous()) for k, v in blocks]
    parts = [kernel.forward(q, k, v) for k, v in blocks]
    whole = parts[0] if len(parts) == 1 else merge(*parts)
    whole = Partial(whole.out.to(dtype), whole.lse)
    gradients = [kernel.backward(grad, q, k, v, whole) for k, v in blocks]
    dq = sum(part[0].double() for part in gradients)
    dk, dv = (torch.cat([part[place] for part in gradients], dim=2) for place in (1, 2))
    return [*whole, dq, dk, dv]


def formula(dtype, device):
    """The same by autograd through PyTorch's own softmax, in fp64 on what `dtype` can hold."""
    q, k, v, grad = (t.double() for t in tensors(dtype, device))
    for x in (q, k, v):
        x.requires_grad_()
    scores = q @ k.mT / q.shape[-1] ** 0.5
    out = scores.softmax(-1) @ v
    return [out, scores.logsumexp(-1), *torch.autograd.grad(out, (q, k, v), grad)]


def agree(name, dtype, device, split, limit):
    for found, right in zip(in_blocks(name, dtype, device, split), formula(dtype, device), strict=True):
        assert found.shape == right.shape
        assert (found - right).norm() <= limit * right.norm()


@pytest.mark.parametrize("split", [None, 1, 170])
@pytest.mark.parametrize("name", ["math", "flash-cpu"])
def test_kernels_for_cpus(name, split):
    agree(name, torch.float64, CPU, split, 1e-12)
    agree(name, torch.float32, CPU, split, 2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [None, 1, 170])
@pytest.mark.parametrize(
    ("name", "dtype", "limit"),
    [
        ("cudnn", torch.bfloat16, 1e-2),
        ("cudnn", torch.float16, 2e-3),
        ("flash", torch.bfloat16, 1e-2),
        ("flash", torch.float16, 2e-3),
        ("efficient", torch.float32, 1e-5),
        ("math", torch.float64, 1e-12),
    ],
)
def test_kernels_for_gpus(name, dtype, limit, split):
    agree(name, dtype, torch.device("cuda"), split, limit)


@pytest.mark.gpu
def test_attention_of_one_gpu_takes_the_kernel_that_is_pinned():
    name = kernels.pin(torch.device("cuda"), torch.bfloat16, [64])
    assert name in ("cudnn", "flash")
    q, k, v, _ = tensors(torch.bfloat16, "cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = F.scaled_dot_product_attention(q, k, v)
    assert f"aten::_scaled_dot_product_{name}_attention" in {event.key for event in profile.key_averages()}
    assert torch.equal(out, kernels.forward(q, k, v).out)


@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient"])
def test_kernels_for_gpus_are_called_as_this_pytorch_declares_them(name):
    """On no device at all: arguments and shapes only."""
    dtype = torch.float32 if name == "efficient" else torch.bfloat16
    q, k, v, grad = tensors(dtype, "meta")
    part = KERNELS[name].forward(q, k, v)
    assert part.out.shape == q.shape
    assert part.lse.shape == q.shape[:3]
    assert part.lse.dtype == torch.float32
    gradients = KERNELS[name].backward(grad, q, k, v, part)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


def test_a_kernel_that_is_missing_or_wrong_is_passed_over(monkeypatch):
    assert kernels._works("flash-cpu", CPU, torch.float32, 16)
    assert not kernels._works("cudnn", CPU, torch.bfloat16, 16)  # not on this device
    right = KERNELS["math"]
    halved = right._replace(backward=lambda *inputs: tuple(x / 2 for x in right.backward(*inputs)))
    monkeypatch.setitem(KERNELS, "math", halved)
    assert not kernels._works("math", CPU, torch.float64, 16)


def test_a_job_in_bf16_that_no_fused_kernel_serves_is_refused(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(kernels, "kernel_name", lambda _device, _dtype, width: "math" if width % 8 else "flash")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    with pytest.raises(KernelError, match=r"no fused attention kernel works on a GPU .* heads of 20 channels"):
        kernels.pin(gpu, torch.bfloat16, [64, 20])


def test_on_cpus_there_is_one_kernel():
    assert kernels.pin(CPU, torch.bfloat16, [64, 20]) == "flash-cpu"
