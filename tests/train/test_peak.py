from types import SimpleNamespace

import pytest
import torch

from sfm.train.peak import peak


def test_the_measured_rate_is_that_of_the_fastest_product(monkeypatch):
    ends = iter([0.0, 9.0, 10.0, 13.0, 20.0, 20.5, 30.0, 31.0])  # begin and end of four products: the third takes 0.5 s
    # Not the clock of the whole process: a service that another test started may look at it.
    monkeypatch.setattr("sfm.train.peak.time", SimpleNamespace(perf_counter=lambda: next(ends)))
    found = peak(torch.device("cpu"), torch.float32)
    assert found.flops == pytest.approx(2 * 1024**3 / 0.5)
    assert "1024 x 1024 fp32" in found.of


@pytest.mark.parametrize(
    ("name", "known"), [("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA T4", None)]
)
def test_known_gpus_have_their_data_sheets_rate(monkeypatch, name, known):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)  # noqa: ARG005
    monkeypatch.setattr("sfm.train.peak._matrix_rate", lambda *_: 1.0)
    found = peak(torch.device("cuda"), torch.bfloat16)
    assert found.flops == (989.5e12 if known else 1.0)
    assert (known or "measured") in found.of
