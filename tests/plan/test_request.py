from sfm import plan
from sfm.spec import parse_spec


def test_a_request_counts_workers_and_readers():
    job = {
        "surveys": [{"url": "unused"}],
        "parallel": {"workers": 4},
        "resources": {"device": "gpu", "cpus_per_worker": 2, "reader_cpus": 0.5},
    }
    assert plan.request(parse_spec(job)) == plan.Request(workers=4, cpus=10.0, gpus=4)
    assert plan.request(parse_spec({**job, "feed": "direct"})) == plan.Request(workers=4, cpus=8.0, gpus=4)
