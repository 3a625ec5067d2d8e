"""What fits, what would, and what a job takes on which GPU."""

import re

import pytest
import yaml
from click.testing import CliRunner

from sfm import plan
from sfm.cli import sfm
from sfm.plan.fit import FitError, check, nearest
from sfm.plan.machines import GPUS
from sfm.spec import SpecError, dump_spec, parse_spec


def job(**fields):
    """ViT-H at 1,179,648 tokens."""
    base = {
        "surveys": [{"url": "s3://surveys/basin.mdio"}],
        "window": {"shape": [1536, 1536, 2048]},
        "model": {"preset": "huge"},
        "batch": {"size": 8, "micro": 1},
        "precision": "bf16",
        "resources": {"device": "gpu", "gpu": "H200"},
        "parallel": {"workers": 8, "context": 8},
    }
    return parse_spec({**base, **fields})


def test_a_job_that_does_not_fit_is_refused_with_one_that_does():
    spec = job(parallel={"workers": 1}, batch={"size": 2})
    with pytest.raises(FitError, match=r"window\.shape \[1536, 1536, 2048\] needs .* GiB on each device .* a H200"):
        check(spec)
    words, fitting = nearest(spec, GPUS["H200"].memory * 0.92)
    check(fitting)
    with pytest.raises(FitError, match=re.escape(words)):
        check(spec)


def test_memory_of_the_spec_or_of_the_device_found_is_what_counts():
    spec = job(model={"preset": "huge", "checkpoint_activations": True})
    check(spec)
    with pytest.raises(FitError, match=r"resources\.memory_gib"):
        check(job(resources={"device": "gpu", "memory_gib": 8.0}))
    with pytest.raises(FitError, match="this device"):
        check(spec, 8 * 2**30)
    check(job(resources={"device": "gpu"}, parallel={"workers": 1}))  # nothing is known of the device


@pytest.mark.parametrize("room", [60e9, 25e9, 12e9, 5e9, 2e9, 0.5e9])
def test_what_is_advised_fits_and_is_what_the_words_say(room):
    spec = job(parallel={"workers": 2, "engine": "ddp"}, model={"preset": "tiny"}, batch={"size": 16})
    found = nearest(spec, room)
    if found is None:
        pytest.fail(f"nothing fits into {room}")
    words, fitting = found
    assert plan.memory(fitting).total <= room
    assert fitting != spec
    assert words


def test_nothing_fits_into_nothing():
    assert nearest(job(), 1e6) is None
    with pytest.raises(FitError, match="take a smaller window"):
        check(job(resources={"device": "gpu", "memory_gib": 0.001}))


def test_gpus_are_named_only_for_gpu_jobs():
    with pytest.raises(SpecError, match="gpu H200 is for device gpu"):
        job(resources={"gpu": "H200"})


def test_the_busiest_rank_sends_fewest_bytes_in_auto():
    def mode(context, **fields):
        found = plan.settle(job(parallel={"workers": context, "context": context}, **fields)).parallel
        return found.context_mode, found.ulysses

    assert mode(2) == ("ulysses", 1)  # 10 and 4 heads
    assert mode(8) == ("hybrid", 2)
    assert mode(3) == ("gather", 1)  # three deals out neither
    for context in (2, 3, 4, 8):
        parallel = {"workers": context, "context": context}
        best = max(plan.context_traffic(plan.settle(job(parallel=parallel))))
        for other in ("gather", "ring"):
            assert best <= max(plan.context_traffic(job(parallel={**parallel, "context_mode": other})))


def test_a_forecast_grows_with_the_work():
    small, large = (plan.forecast(job(batch={"size": n, "micro": 1}), "H200") for n in (8, 16))
    assert large.compute_seconds == pytest.approx(2 * small.compute_seconds)
    assert large.engine_bytes == pytest.approx(2 * small.engine_bytes, rel=0.5)
    # 112 PFLOP a sample at 45 % of eight H200
    assert small.compute_seconds == pytest.approx(8 * 112e15 / (8 * 0.45 * 989.5e12), rel=0.01)
    assert small.context_seconds < small.compute_seconds / 10


def test_sfm_plan_says_what_fits(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(dump_spec(job(model={"preset": "huge", "checkpoint_activations": True})))
    text = CliRunner().invoke(sfm, ["plan", str(path)], catch_exceptions=False)
    assert text.exit_code == 0
    assert "1,179,648" in text.output
    assert "H200" in text.output
    found = yaml.safe_load(CliRunner().invoke(sfm, ["plan", str(path), "--json"], catch_exceptions=False).output)
    assert found["tokens_per_sample"] == 1_179_648
    assert found["context_mode"] == "hybrid"
    assert {f["gpu"] for f in found["forecasts"]} == set(GPUS)
    one = CliRunner().invoke(sfm, ["plan", str(path), "--gpu", "H200", "--json"], catch_exceptions=False)
    assert [f["gpu"] for f in yaml.safe_load(one.output)["forecasts"]] == ["H200"]


def test_sfm_plan_fails_where_the_job_names_gpus_it_does_not_fit(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(dump_spec(job(parallel={"workers": 1})))
    result = CliRunner().invoke(sfm, ["plan", str(path)])
    assert isinstance(result.exception, FitError)
