"""The job spec: what is refused, in which words, and what is derived."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from sfm.spec import JobSpec, SpecError, absolute, dump_spec, load_spec, parse_spec, parse_yaml, visible_tokens

MINIMAL = {"surveys": [{"url": "s3://bucket/a.mdio"}], "window": {"shape": [64, 64, 64]}}


def refused(changes):
    with pytest.raises(SpecError) as caught:
        parse_spec({**MINIMAL, **changes})
    return str(caught.value)


def test_defaults_are_a_valid_job():
    spec = parse_spec({"surveys": [{"url": "a.mdio"}]})
    assert (spec.grid, spec.tokens, spec.micro_batch, spec.accumulation) == ((8, 8, 8), 512, 8, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": {"shape": [60, 64, 64]}}, ["model.patch 16", "window.shape 60", "inline", "48 or 64"]),
        ({"model": {"preset": "hugh"}}, ["model.preset: unknown preset 'hugh'", "did you mean 'huge'?"]),
        ({"paralel": {}}, ["paralel: unknown field", "did you mean 'parallel'?"]),
        ({"surveys": [{"url": "a", "wieght": 2}]}, ["surveys[0].wieght: unknown field", "'weight'"]),
        (
            {"model": {"encoder": {"width": 64, "depth": 1, "heads": 5, "mlp": 9}}},
            ["model.encoder", "heads 5", "width 64"],
        ),
        ({"parallel": {"workers": 3, "context": 2}}, ["context 2", "workers 3"]),
        ({"parallel": {"workers": 3}}, ["batch.size 8", "data degree 3"]),
        ({"batch": {"size": 8, "micro": 3}}, ["batch.micro 3", "batch.size"]),
        (
            {"parallel": {"workers": 8, "context": 8}},
            ["parallel.context 8", "4 patch rows", "window.shape", "degree here is 4"],
        ),
        ({"mask": {"ratio": 0.999}}, ["mask.ratio 0.999", "window.shape"]),
        ({"mask": {"ratio": 1.5}}, ["mask.ratio", "not 1.5"]),
        ({"steps": 10, "optimiser": {"warmup_steps": 10}}, ["optimiser.warmup_steps 10", "steps 10"]),
        ({"optimiser": {"lr": 1e-4, "min_lr": 1e-3}}, ["min_lr", "lr"]),
        (
            {"parallel": {"workers": 2, "context": 2, "context_mode": "ulysses"}, "model": {"preset": "tiny"}},
            ["parallel.context_mode ulysses", "2 ranks", "model.encoder 3", "take a degree that divides 3"],
        ),
        (
            {"parallel": {"workers": 4, "context": 4, "context_mode": "hybrid", "ulysses": 3}},
            ["ulysses 3", "context 4", "[2]"],
        ),
        ({"parallel": {"workers": 2, "context": 2, "ulysses": 2}}, ["ulysses 2", "context_mode hybrid"]),
        (
            {"mask": {"even": True}, "parallel": {"workers": 3, "context": 3}, "batch": {"size": 3}},
            ["mask.even", "4 patch rows", "window.shape 64", "parallel.context 3", "degree that does is 2"],
        ),
        (
            {"mask": {"even": True}, "parallel": {"workers": 4, "context": 4}, "model": {"registers": 5}},
            ["mask.even", "model.registers 5", "parallel.context 4", "numbers that do are 4 and 8"],
        ),
        ({"mask": {"even": True, "ratio": 0.999}}, ["mask.ratio 0.999", "window.shape"]),
        (
            {"parallel": {"workers": 2, "context": 2, "context_mode": "torch"}},
            ["parallel.context_mode torch", "CPUs", "gather or ring", "resources.device gpu"],
        ),
        (
            {"parallel": {"workers": 2, "context": 2, "context_mode": "torch"}, "resources": {"device": "gpu"}},
            ["parallel.context_mode torch", "precision fp32", "gather or ring", "precision bf16"],
        ),
        (
            {
                "parallel": {"workers": 2, "context": 2, "context_mode": "torch"},
                "resources": {"device": "gpu"},
                "precision": "bf16",
            },
            ["parallel.context_mode torch", "evenly", "mask.even true"],
        ),
        ({"optimiser": {"lr": float("nan")}}, ["optimiser.lr"]),
        ({"surveys": []}, ["surveys"]),
        ({"name": "../x"}, ["name"]),
        ({"steps": "many"}, ["steps", '"many"']),
    ],
)
def test_a_refusal_names_the_fields(changes, words):
    sentence = refused(changes)
    for word in words:
        assert word in sentence, sentence


def test_every_mistake_is_listed():
    sentence = refused({"steps": 0, "mask": {"ratio": 2}, "colour": "red"})
    assert [line.split(":")[0] for line in sentence.splitlines()] == ["mask.ratio", "steps", "colour"]


def test_not_a_mapping():
    with pytest.raises(SpecError, match="a job spec is a mapping"):
        parse_spec(["steps"])


def test_malformed_yaml_names_the_place(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("steps: 3\nmask: {ratio: 0.5\nname: x")
    with pytest.raises(SpecError, match=r"job\.yaml line 3, column \d+: malformed YAML"):
        load_spec(path)


def test_missing_file(tmp_path):
    with pytest.raises(SpecError, match="No such file"):
        load_spec(tmp_path / "none.yaml")


def test_json_is_yaml():
    assert parse_spec(parse_yaml(json.dumps(MINIMAL), where="body")) == parse_spec(MINIMAL)


def test_what_is_stored_reads_back_the_same():
    spec = parse_spec(MINIMAL)
    assert parse_spec(yaml.safe_load(dump_spec(spec))) == spec


def test_a_disk_cache_is_a_folder():
    assert "disk_cache" in refused({"resources": {"disk_cache": "s3://bucket/cache"}})


def test_relative_places_are_seen_from_where_a_job_was_submitted(tmp_path):
    spec = parse_spec(
        {
            "surveys": [{"url": "a.mdio"}, {"url": "s3://b/c.mdio"}],
            "output": "runs/x",
            "checkpoint": {"start_from": "../old"},
            "resources": {"disk_cache": "kept"},
        }
    )
    spec = absolute(spec, tmp_path)
    assert [survey.url for survey in spec.surveys] == [str(tmp_path / "a.mdio"), "s3://b/c.mdio"]
    assert (spec.output, spec.resources.disk_cache) == (str(tmp_path / "runs/x"), str(tmp_path / "kept"))
    assert spec.checkpoint.start_from == str(tmp_path.parent / "old")


def test_the_example_is_valid(request):
    spec = load_spec(request.config.rootpath / "examples" / "job.yaml")
    assert spec.tokens == 102_400


def test_every_field_is_documented():
    def undocumented(model, where):
        for name, field in model.model_fields.items():
            section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            if section:
                yield from undocumented(field.annotation, f"{where}.{name}")
            elif not field.description:
                yield f"{where}.{name}"
            elif not field.is_required() and "default" not in field.description.lower():
                yield f"{where}.{name} states no default"

    assert list(undocumented(JobSpec, "spec")) == []


@given(tokens=st.integers(2, 10**7), ratio=st.floats(0.01, 0.99))
def test_visible_tokens_are_the_nearest_count(tokens, ratio):
    assert abs(visible_tokens(tokens, ratio) - (1 - ratio) * tokens) <= 0.5 + 1e-6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("surveys: 2024-13-01", "month must be in 1..12"),
        ("[" * 3000, "nested more than 32 levels"),
        ("a: &x 1\nb: *x", "aliases"),
        ("steps: 5\nsteps: 6", r"line 2, column 1: malformed YAML: 'steps' stands twice"),
        ("resources: {cpus_per_worker: .inf}", "cpus_per_worker"),
    ],
)
def test_odd_yaml_is_a_sentence(text, words):
    with pytest.raises(SpecError, match=words):
        parse_spec(parse_yaml(text, where="job.yaml"))
