from sfm import plan
from sfm.spec import parse_spec


def memory_of(engine, workers=8, precision="bf16"):
    spec = parse_spec(
        {"surveys": [{"url": "unused"}], "parallel": {"workers": workers, "engine": engine}, "precision": precision}
    )
    return plan.memory(spec), plan.parameters(spec)


def test_each_stage_shards_one_thing_more():
    one, n = memory_of("zero1")
    two, _ = memory_of("zero2")
    three, _ = memory_of("zero3")
    assert (one.weights, one.gradients, one.optimiser) == (2 * n, 2 * n, 12 * n // 8)
    assert (two.weights, two.gradients, two.optimiser) == (2 * n, 2 * n // 8, 12 * n // 8)
    assert (three.weights, three.gradients, three.optimiser) == (2 * n // 8, 2 * n // 8, 12 * n // 8)


def test_context_parallelism_shares_activations():
    def activations(context):
        job = {
            "surveys": [{"url": "unused"}],
            "parallel": {"workers": context, "context": context},
            "batch": {"size": 1},
        }
        return plan.memory(parse_spec(job)).activations

    assert activations(8) < activations(4) < activations(2) < activations(1)


def test_a_request_counts_workers_and_readers():
    job = {
        "surveys": [{"url": "unused"}],
        "parallel": {"workers": 4},
        "resources": {"device": "gpu", "cpus_per_worker": 2, "reader_cpus": 0.5},
    }
    assert plan.request(parse_spec(job)) == plan.Request(workers=4, cpus=10.0, gpus=4)
    assert plan.request(parse_spec({**job, "feed": "direct"})) == plan.Request(workers=4, cpus=8.0, gpus=4)
