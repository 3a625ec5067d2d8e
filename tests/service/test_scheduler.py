"""The scheduler's promises, over random queues."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from service.cluster.jobs import capacity_of
from service.jobs.scheduler import SLACK, Capacity, Waiting, schedule, too_large
from service.settings import Settings
from sfm.plan import Request, request
from sfm.spec import parse_spec
from tests.service.conftest import spec

quarters = st.integers(1, 64).map(lambda n: n / 4)
requests = st.builds(Request, workers=st.integers(1, 8), cpus=quarters, gpus=st.integers(0, 8))
capacities = st.builds(Capacity, cpus=st.integers(0, 32).map(float), gpus=st.integers(0, 8).map(float))


@st.composite
def queues(draw: st.DrawFn) -> list[Waiting]:
    needs = draw(st.lists(requests, max_size=8))
    jobs = [Waiting(f"job{n}", draw(st.integers(-2, 2)), n, need) for n, need in enumerate(needs)]
    return draw(st.permutations(jobs))


@given(queues(), st.lists(requests, max_size=4), capacities)
def test_promises(queue: list[Waiting], running: list[Request], capacity: Capacity) -> None:
    decision = schedule(queue, running, capacity)
    jobs = {job.id: job for job in queue}

    # Every job is either admitted or told why not, never both.
    assert sorted([*decision.admitted, *decision.reasons]) == sorted(jobs)
    assert all(reason and reason[0].islower() for reason in decision.reasons.values())

    # Gangs fit as a whole, beside what runs.
    used = [*running, *(jobs[i].request for i in decision.admitted)]
    if decision.admitted:
        assert sum(r.cpus for r in used) <= capacity.cpus + SLACK
        assert sum(r.gpus for r in used) <= capacity.gpus + SLACK

    # Nobody overtakes: among jobs that the cluster could hold, the admitted ones are the first of the queue.
    order = sorted(queue, key=lambda j: (-j.priority, j.number))
    possible = [j.id for j in order if capacity.holds(j.request.cpus, j.request.gpus)]
    assert list(decision.admitted) == possible[: len(decision.admitted)]

    # No room is left idle that the next one could take.
    if rest := possible[len(decision.admitted) :]:
        head = jobs[rest[0]].request
        cpus, gpus = sum(r.cpus for r in used), sum(r.gpus for r in used)
        assert not capacity.holds(cpus + head.cpus, gpus + head.gpus)
        assert all(rest[0] in decision.reasons[other] for other in rest[1:])


@given(queues(), st.lists(requests, max_size=4), capacities)
def test_order_of_the_input_does_not_matter(queue: list[Waiting], running: list[Request], capacity: Capacity) -> None:
    assert schedule(queue, running, capacity) == schedule(list(reversed(queue)), running[::-1], capacity)


@given(queues(), capacities)
def test_every_job_that_fits_ends_up_running(queue: list[Waiting], capacity: Capacity) -> None:
    """No starvation: when whatever was admitted ends, the rest follows."""
    left = list(queue)
    while admitted := schedule(left, [], capacity).admitted:
        left = [j for j in left if j.id not in admitted]
    assert not any(capacity.holds(j.request.cpus, j.request.gpus) for j in left)


@given(requests, capacities)
def test_a_job_is_refused_exactly_if_the_empty_cluster_cannot_hold_it(need: Request, capacity: Capacity) -> None:
    sentence = too_large(need, capacity)
    assert (sentence is None) == (schedule([Waiting("a", 0, 1, need)], [], capacity).admitted == ("a",))
    if sentence:
        assert sentence.startswith(f"parallel.workers {need.workers} ")


def test_the_advised_number_of_workers_fits() -> None:
    capacity = Capacity(8, 0)
    many = request(parse_spec(spec(parallel={"workers": 16}, batch={"size": 16})))
    assert str(too_large(many, capacity)).endswith("take at most 6")
    six = request(parse_spec(spec(parallel={"workers": 6}, batch={"size": 6})))
    assert too_large(six, capacity) is None


def test_gpus_of_a_model_are_counted_unless_others_may_join(tmp_path: Path) -> None:
    nodes = [
        {"CPU": 0.0},  # the head
        {"CPU": 96.0, "GPU": 8.0, "accelerator_type:H100": 1.0},
        *[{"CPU": 96.0, "GPU": 4.0, "accelerator_type:H200": 1.0}] * 2,
    ]

    def refusal(workers: int, gpu: str | None, **settings: float) -> str | None:
        capacity = capacity_of(nodes, Settings(state_dir=tmp_path, **settings))  # type: ignore[arg-type]
        return too_large(Request(workers, workers, workers), capacity, gpu)

    assert refusal(8, "H200") is None
    assert refusal(16, None) is None
    assert refusal(12, "H200") == (
        "resources.gpu H200: parallel.workers 12 need 12 of these, but of GPUs the whole cluster has 8 H100, 8 H200; "
        "take at most 8, ask for others, or add nodes"
    )
    assert str(refusal(1, "B200")).endswith("has 8 H100, 8 H200; ask for others, or add nodes")
    assert str(refusal(17, "B200")).startswith("parallel.workers 17 need 17 CPUs and 17 GPUs in all")
    assert refusal(12, "B200", max_gpus=32) is None
    assert "none of a model that Ray knows" in str(too_large(Request(1, 1, 1), Capacity(8, 8, {}), "H200"))


def test_a_large_job_is_not_starved_by_small_ones() -> None:
    large, small = Request(8, 8, 0), Request(1, 1, 0)
    decision = schedule([Waiting("large", 0, 1, large), Waiting("small", 0, 2, small)], [small], Capacity(8, 0))
    assert decision.admitted == ()
    assert (
        decision.reasons["large"] == "needs 8 CPUs, but 7 CPUs and 0 GPUs are free now; waits for running jobs to end"
    )
    assert decision.reasons["small"] == "waits behind job large, which is ahead in the queue and waits for room"
