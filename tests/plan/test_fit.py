"""What fits, what would, and what a job takes on which GPU."""

import random
import re

import pytest
import yaml
from click.testing import CliRunner

from sfm import plan
from sfm.cli import sfm
from sfm.plan.fit import FitError, capacity, changed, check, in_words, nearest
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


def read(words):
    """Changes, as a user reads them out of a sentence."""
    return [
        (field, yaml.safe_load(value))
        for field, value in (part.split(" ", 1) for part in re.split(r", (?=[a-z])", words))
    ]


def test_a_job_that_does_not_fit_is_refused_with_one_that_does():
    spec = job(parallel={"workers": 1}, batch={"size": 2})
    with pytest.raises(
        FitError, match=r"window\.shape \[1536, 1536, 2048\] needs .* GiB on each device .* a H200"
    ) as no:
        check(spec)
    check(changed(spec, read(str(no.value).split("what fits: ")[1])))


def test_memory_of_the_spec_or_of_the_device_found_is_what_counts():
    spec = job(model={"preset": "huge", "checkpoint_activations": True})
    check(spec)
    with pytest.raises(FitError, match=r"resources\.memory_gib"):
        check(job(resources={"device": "gpu", "memory_gib": 8.0}))
    with pytest.raises(FitError, match="this device"):
        check(spec, 8 * 2**30)
    check(job(resources={"device": "gpu"}, parallel={"workers": 1}))  # nothing is known of the device


def a_job(draw):
    """Any small job with any way to split it; None where there is none such."""
    context, data, recompute = draw.choice([1, 2, 3, 4, 6, 8]), draw.choice([1, 2]), draw.random() < 0.4
    mode = draw.choice(["auto", "gather", "ring", "ulysses", "hybrid"])
    engine = draw.choice(["ddp", "zero1", "zero2", "zero3", "fsdp2"])
    try:
        return job(
            window={"shape": [16 * draw.randint(4, 16) for _ in range(3)]},
            model={
                "preset": draw.choice(["tiny", "small", "base", "large"]),
                "registers": draw.choice([0, 1, 4]),
                "checkpoint_activations": recompute,
                "keep_attention": recompute and draw.random() < 0.5,
            },
            mask={"even": draw.random() < 0.2},
            batch={"size": data * draw.choice([1, 2, 6])},
            precision=draw.choice(["fp32", "bf16"]),
            resources={"device": draw.choice(["cpu", "gpu"])},
            parallel={
                "workers": context * data,
                "context": context,
                "context_mode": mode,
                "ulysses": 2 if mode == "hybrid" else 1,
                "engine": engine,
            },
        )
    except SpecError:
        return None


@pytest.mark.parametrize("seed", range(300))
def test_what_is_advised_fits_and_nothing_of_it_can_be_left_out(seed):
    draw = random.Random(seed)
    spec = next(spec for spec in iter(lambda: a_job(draw), 0) if spec is not None)
    need = plan.memory(spec).total
    if draw.random() < 0.5:
        resources = {**spec.resources.model_dump(), "memory_gib": draw.choice([0.9, 0.4, 0.1, 0.03]) * need / 2**30}
        spec = parse_spec({**spec.model_dump(mode="json"), "resources": resources})
    room = capacity(spec) or draw.choice([0.9, 0.4, 0.1, 0.03]) * need
    if plan.memory(spec).total <= room:  # with room known, auto may find another way
        return
    changes, best = nearest(spec, room)
    if plan.memory(best).total > room:
        least = plan.memory(best)
        assert least.total - least.activations > room / 2  # and what an engine holds has nothing to do with the window
        return
    advised = read(in_words(changes))
    assert advised
    assert changed(spec, advised) == best
    if spec.resources.device == "cpu":
        assert "offload" not in in_words(changes)
    for left_out in advised:
        try:
            without = changed(spec, [change for change in advised if change != left_out])
        except SpecError:
            continue
        assert plan.memory(without).total > room, left_out


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"parallel": {"workers": 1}, "batch": {"size": 4}}, "batch.micro 2"),
        ({"model": {"preset": "huge", "checkpoint_activations": True, "keep_attention": True}},
         "model.keep_attention false, model.offload_activations true"),
        ({"parallel": {"workers": 6, "context": 6, "context_mode": "gather"}}, "model.checkpoint_activations true"),
        ({"parallel": {"workers": 3, "context": 3, "context_mode": "gather"},
          "model": {"preset": "huge", "checkpoint_activations": True}},
         "model.offload_activations true, parallel.context_mode ring"),
        ({"window": {"shape": [64, 64, 64]}, "parallel": {"workers": 1}}, "parallel.workers 4"),
    ],
)  # fmt: skip
def test_the_advice_is_the_cheapest_change(fields, advice):
    spec = job(resources={"device": "gpu"}, **fields)
    room = plan.memory(changed(spec, read(advice))).total
    assert in_words(nearest(spec, room)[0]) == advice


@pytest.mark.parametrize(
    ("parallel", "also"),
    [
        ({"workers": 2, "context": 2, "context_mode": "ulysses"}, ""),
        ({"workers": 4, "context": 4, "context_mode": "hybrid", "ulysses": 2}, "parallel.ulysses 1, "),
    ],
)
def test_a_mode_that_cannot_serve_gives_way_in_words(parallel, also):
    model = {"preset": "huge", "checkpoint_activations": True, "offload_activations": True}
    rows_of_five = job(
        window={"shape": [80, 1536, 1536]}, model=model, batch={"size": 1}, resources={"device": "gpu"},
        parallel={**parallel, "engine": "zero3"},
    )  # fmt: skip
    advice = f"parallel.context 5, parallel.context_mode auto, {also}parallel.workers 5"
    room = plan.memory(changed(rows_of_five, read(advice))).total
    assert in_words(nearest(rows_of_five, room)[0]) == advice


def test_where_nothing_fits_the_sentence_says_what_to_do():
    with pytest.raises(
        FitError,
        match=r"leaves 1\.0 MiB; .* still takes .* take a smaller model\.preset, or .* zero3 over more workers",
    ):
        check(job(resources={"device": "gpu", "memory_gib": 2**-10}))


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


def test_auto_takes_a_mode_that_fits():
    def auto(room=None, mode="auto"):
        model = {"preset": "huge", "checkpoint_activations": True}
        parallel = {"workers": 3, "context": 3, "context_mode": mode}
        return job(model=model, parallel=parallel, resources={"device": "gpu", "memory_gib": room and room / 2**30})

    gather, ring = (plan.memory(auto(mode=mode)).total for mode in ("gather", "ring"))
    assert ring < gather
    assert plan.settle(auto(gather + 1)).parallel.context_mode == "gather"  # which sends fewer bytes
    assert plan.settle(auto((gather + ring) / 2)).parallel.context_mode == "ring"
    check(auto((gather + ring) / 2))
    assert plan.settle(auto(1e9)).parallel.context_mode == "gather"  # neither fits


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


def test_sfm_plan_says_what_would_fit_on_a_gpu_that_was_only_asked_about(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(dump_spec(job(parallel={"workers": 1}, resources={"device": "cpu", "memory_gib": 1000.0})))
    result = CliRunner().invoke(sfm, ["plan", str(path), "--gpu", "A100"], catch_exceptions=False)
    assert result.exit_code == 0
    said = result.output.splitlines()[-1]
    assert said.startswith("on A100 it does not fit: window.shape")
    on_a100 = job(parallel={"workers": 1}, resources={"device": "gpu", "gpu": "A100"})
    check(changed(on_a100, read(said.split("what fits: ")[1])))
    result = CliRunner().invoke(sfm, ["plan", str(path), "--gpu", "A100", "--json"], catch_exceptions=False)
    assert not yaml.safe_load(result.stdout)["forecasts"][0]["fits"]
    assert "what fits: " in result.stderr
