"""Checkpoints: what is committed, what is not, and what is refused."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sfm.spec import SfmError, Storage, parse_spec
from sfm.survey.preflight import open_all, sampler_of
from sfm.survey.sampler import Cursor
from sfm.train import checkpoint
from sfm.train.output import Output
from sfm.train.start import CheckpointError, ClusterError, check, check_cluster, committed, find_start, first_sample
from tests.survey.conftest import write_v1

CURSOR = Cursor(2, 5, "0123456789abcdef")
SHAPES = {"a.weight": (3, 2), "b": (5,)}


@pytest.fixture
def output(tmp_path):
    return Output(str(tmp_path / "run"), Storage())


def spec_of(**options):
    return parse_spec({"surveys": [{"url": "unused"}], "checkpoint": options})


def state(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        part: {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
        for part in ("weights", "exp_avg", "exp_avg_sq")
    }


def test_reads_back_the_same_bits(output):
    checkpoint.save(output, state(0), 7, CURSOR, spec_of())
    resume = checkpoint.load(find_start(output, spec_of()), SHAPES)
    assert resume.steps == 7
    for part, tensors in state(0).items():
        for name, tensor in tensors.items():
            assert torch.equal(resume.state[part][name], tensor)


def test_keeps_the_newest(output):
    for steps in (10, 20, 30):
        checkpoint.save(output, state(steps), steps, CURSOR, spec_of(keep=2))
    assert [found.steps for found in committed(output)] == [20, 30]
    assert output.list("checkpoints") == ["step-00000020", "step-00000030"]


def test_without_a_manifest_it_was_never_written(output):
    checkpoint.save(output, state(0), 10, CURSOR, spec_of())
    checkpoint.save(output, state(1), 20, CURSOR, spec_of())
    Path(output.path("checkpoints/step-00000020/MANIFEST.json")).unlink()
    assert find_start(output, spec_of()).steps == 10


@pytest.mark.parametrize("name", ["weights.safetensors", "exp_avg.safetensors", "state.json"])
def test_one_flipped_bit_is_refused(output, name):
    checkpoint.save(output, state(0), 10, CURSOR, spec_of())
    path = Path(output.path(f"checkpoints/step-00000010/{name}"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is missing or damaged"):
        checkpoint.load(find_start(output, spec_of()), SHAPES)


def test_another_model_is_refused(output):
    checkpoint.save(output, state(0), 10, CURSOR, spec_of())
    with pytest.raises(CheckpointError, match=r"weights of a\.weight does not fit"):
        checkpoint.load(find_start(output, spec_of()), {**SHAPES, "a.weight": (2, 3)})


def test_starts_from_another_job_only_where_it_has_none_of_its_own(output, tmp_path):
    other = Output(str(tmp_path / "other"), Storage())
    checkpoint.save(other, state(0), 50, CURSOR, spec_of())
    assert find_start(output, spec_of()) is None
    assert find_start(output, spec_of(start_from=other.url)).steps == 50
    checkpoint.save(output, state(1), 60, CURSOR, spec_of())
    assert find_start(output, spec_of(start_from=other.url)).steps == 60


def test_a_start_without_checkpoint_is_a_mistake(output, tmp_path):
    with pytest.raises(CheckpointError, match="holds no committed checkpoint"):
        find_start(output, spec_of(start_from=str(tmp_path / "nothing")))


def test_stores_the_spec_and_the_cursor(output):
    spec = spec_of()
    checkpoint.save(output, state(0), 10, CURSOR, spec)
    about = json.loads(output.read("checkpoints/step-00000010/state.json"))
    assert about["cursor"] == {"epoch": 2, "index": 5, "plan": "0123456789abcdef"}
    assert parse_spec(about["spec"]) == spec


def test_a_start_with_nothing_left_to_train_is_a_mistake(output, tmp_path):
    other = Output(str(tmp_path / "other"), Storage())
    checkpoint.save(other, state(0), 1000, CURSOR, spec_of())
    with pytest.raises(CheckpointError, match="has 1000 steps behind it, and steps 1000 asks for no more"):
        find_start(output, spec_of(start_from=other.url))


def with_output(url, **options):
    return spec_of(**options).model_copy(update={"output": url})


def test_not_to_resume_refuses_a_used_output(output):
    check(with_output(output.url, resume=False))
    checkpoint.save(output, state(0), 10, CURSOR, spec_of())
    with pytest.raises(CheckpointError, match=r"holds checkpoints of an earlier run and checkpoint\.resume is false"):
        check(with_output(output.url, resume=False))
    assert output.list("") == ["checkpoints"]


@pytest.fixture
def job(tmp_path, output):
    """A job over a survey of 24 inlines, 8 of them held out."""

    def make(**window):
        url = write_v1(tmp_path / "s.mdio", np.ones((24, 8, 16), "f4"), chunks=(8, 8, 16))
        return parse_spec(
            {
                "surveys": [{"url": url}],
                "window": {"shape": [4, 4, 8], "held_out": 0.3, "blocks": 1, **window},
                "model": {"preset": "tiny", "patch": [2, 2, 4]},
                "batch": {"size": 2},
                "steps": 100,
                "output": output.url,
            }
        )

    return make


def test_a_job_goes_on_behind_what_it_consumed(output, job):
    sampler = sampler_of(job(), open_all(job()))
    checkpoint.save(output, state(0), 10, sampler.cursor(7), job())
    assert first_sample(find_start(output, job()), output, sampler) == 7
    assert first_sample(None, output, sampler) == 0
    check(job())


def test_other_windows_are_refused_before_anything_starts(output, job, tmp_path):
    sampler = sampler_of(job(), open_all(job()))
    checkpoint.save(output, state(0), 10, sampler.cursor(7), job())
    wider = job(shape=[4, 8, 8])
    with pytest.raises(SfmError, match=r"the order of windows is not the one that epoch 0, window 7 was reached in"):
        check(wider)
    # The weights alone may begin a job over other windows.
    another = Output(str(tmp_path / "another"), Storage())
    of_weights = wider.checkpoint.model_copy(update={"start_from": output.url})
    wider = wider.model_copy(update={"output": another.url, "checkpoint": of_weights})
    check(wider)
    other = sampler_of(wider, open_all(wider))
    assert first_sample(find_start(another, wider), another, other) == 0
    assert first_sample(find_start(another, wider), another, sampler) == 7


def test_a_checkpoint_without_a_cursor_is_refused(output, job):
    sampler = sampler_of(job(), open_all(job()))
    checkpoint.save(output, state(0), 10, sampler.cursor(7), job())
    path = Path(output.path("checkpoints/step-00000010/state.json"))
    path.write_text('{"steps": 10}')
    manifest = path.with_name("MANIFEST.json")
    stated = json.loads(manifest.read_text())
    stated["files"]["state.json"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(stated))
    with pytest.raises(CheckpointError, match=r"step-00000010: it was written by an earlier version"):
        check(job())
    another = Output(f"{output.url}-another", Storage())  # which begins with the weights alone
    assert first_sample(find_start(output, job()), another, sampler) == 0


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"files": {}}'])
def test_a_damaged_manifest_is_a_sentence(output, job, content):
    sampler = sampler_of(job(), open_all(job()))
    checkpoint.save(output, state(0), 10, sampler.cursor(7), job())
    Path(output.path("checkpoints/step-00000010/MANIFEST.json")).write_text(content)
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json is missing or damaged; remove this folder"):
        check(job())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("/proc/none/out", "cannot write it"),
        ("gs://bucket/out", "only local paths and s3:// are served"),
        ("s3://bucket/out", "cannot connect to http://127.0.0.1:9"),
    ],
)
def test_an_output_that_cannot_be_written_is_a_sentence(url, words, monkeypatch):
    for name, value in (("ENDPOINT_URL", "http://127.0.0.1:9"), ("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b")):
        monkeypatch.setenv(f"AWS_{name}", value)
    with pytest.raises(SfmError, match=words):
        check(with_output(url))


def test_a_job_larger_than_the_cluster_is_refused(monkeypatch):
    spec = parse_spec({"surveys": [{"url": "unused"}], "parallel": {"workers": 4}})
    check_cluster(spec, {"CPU": 5})
    with pytest.raises(ClusterError, match=r"parallel\.workers 4 need 5 CPUs in all, the whole cluster has 4"):
        check_cluster(spec, {"CPU": 4})
    monkeypatch.setenv("SFM_MAX_CPUS", "64")
    check_cluster(spec, {"CPU": 4})


def test_gpus_of_a_model_that_the_cluster_does_not_have_are_refused(monkeypatch):
    resources = {"device": "gpu", "gpu": "H200"}
    spec = parse_spec({"surveys": [{"url": "unused"}], "parallel": {"workers": 2}, "resources": resources})
    machine = {"CPU": 16.0, "GPU": 4.0}
    check_cluster(spec, {**machine, "accelerator_type:H200": 1.0})
    with pytest.raises(ClusterError, match=r"resources\.gpu H200: no node .* there are A100, H100: ask for"):
        check_cluster(spec, {**machine, "accelerator_type:H100": 1.0, "accelerator_type:A100": 1.0})
    with pytest.raises(ClusterError, match="none that Ray knows"):
        check_cluster(spec, machine)
    check_cluster(spec.model_copy(update={"resources": spec.resources.model_copy(update={"gpu": None})}), machine)
    monkeypatch.setenv("SFM_MAX_GPUS", "0.0")
    with pytest.raises(ClusterError, match="H200"):
        check_cluster(spec, machine)
    monkeypatch.setenv("SFM_MAX_GPUS", "16")
    check_cluster(spec, machine)
