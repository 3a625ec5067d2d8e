"""The plan of samples: pure, seekable, every cell in turn, and never training on what is held out."""

from __future__ import annotations

import itertools
import json
import math
import tracemalloc
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view

from sfm.feed.order import RankOrder
from sfm.spec import Window
from sfm.survey.cells import Live, Strata
from sfm.survey.clients import SurveyError
from sfm.survey.sampler import Area, Cursor, Sampler, apportion
from sfm.survey.split import cover, tiles

AREAS = [Area((76, 181, 268), 3.0, "a.mdio"), Area((200, 40, 100), 1.0, "b.mdio")]


def sampler(*areas: Area, seed: int = 7, **window: Any) -> Sampler:
    return Sampler(areas or AREAS, Window(**{"shape": (16, 16, 64), **window}), seed)


def enough(area: Area, window: Window) -> np.ndarray:
    """Whether the window at each (inline, crossline) is as live as it must be, counted one by one; bool [I, X]."""
    inside = tuple(min(n, w) for n, w in zip(area.shape[:2], window.shape[:2], strict=True))
    mask = np.ones(area.shape[:2], bool) if area.trace_mask is None else area.trace_mask
    counts = sliding_window_view(mask, inside).sum(axis=(2, 3))
    return counts >= math.ceil(round(window.min_live * math.prod(inside), 6))


def legal_origins(first: int, size: int, window: int, chunk: int | None) -> list[int]:
    """Where windows may start in a stretch of lines: anywhere, or where they meet fewest chunks and at both ends."""
    window = min(window, size)
    every = range(first, first + size - window + 1)
    if chunk is None:
        return list(every)
    met = [len({line // chunk for line in range(origin, origin + window)}) for origin in every]
    fewest = {o for o, n in zip(every, met, strict=True) if n == -(-window // chunk)}
    return sorted(fewest | {every[0], every[-1]})


def strata_of(first: int, size: int, window: int, chunk: int | None) -> list[list[int]]:
    """Origins of each stratum of a stretch of lines, by exact fractions of its legal origins."""
    origins, strata = legal_origins(first, size, window, chunk), math.ceil(size / window)
    many = len(origins)
    return [origins[many * k // strata : math.ceil(many * (k + 1) / strata)] for k in range(strata)]


def cells_of(plan: Sampler, survey: int) -> dict[tuple[int, tuple[int, int, int]], list[list[int]]]:
    """Usable cells of a survey: (block, strata) -> origins along each axis."""
    area, (axis, training, _) = plan.areas[survey], plan.splits[survey]
    legal, found = enough(area, plan.window), {}
    chunks = area.chunks if plan.window.align and area.chunks else (None, None, None)
    for block, lines in enumerate(training):
        whole = [(0, size) for size in area.shape]
        whole[axis] = tuple(lines)
        strata = [strata_of(*part, *rest) for part, *rest in zip(whole, plan.window.shape, chunks, strict=True)]
        for place in itertools.product(*(range(len(s)) for s in strata)):
            cell = [s[k] for s, k in zip(strata, place, strict=True)]
            if legal[np.ix_(*cell[:2])].any():
                found[block, place] = cell
    return found


def drawn_plan(rng: np.random.Generator, seed: int) -> Sampler | None:
    """A small plan of any kind; None where it is refused."""
    shape = tuple(int(n) for n in rng.integers(1, [6, 6, 4]))
    areas = []
    for _ in range(int(rng.integers(1, 3))):
        size = [int(w * rng.integers(1, 4) + rng.integers(0, w)) for w in shape]
        size[int(rng.integers(2))] *= int(rng.integers(1, 4))
        mask = rng.random((size[0], size[1])) < rng.uniform(0.4, 1) if rng.random() < 0.4 else None
        chunks = tuple(int(n) for n in rng.integers(1, 8, 3))
        areas.append(Area(tuple(size), float(rng.choice([0.5, 1, 1, 3])), "s", mask, bool(rng.random() < 0.1), chunks))
    window = Window(
        shape=shape, held_out=float(rng.choice([0, 0.1, 0.3])), blocks=int(rng.integers(1, 3)), pad=True,
        guard=int(rng.integers(0, 3)), min_live=float(rng.choice([0, 0.1, 0.5, 0.8])),
        align=bool(rng.random() < 0.4),
    )  # fmt: skip
    try:
        return Sampler(areas, window, seed)
    except SurveyError:
        return None


@pytest.mark.parametrize("part", range(4))
def test_each_round_visits_each_usable_cell_once_in_training_lines(part: int) -> None:
    seeds, kinds = 0, Counter()
    for seed in range(part * 10**6, part * 10**6 + 10**6):
        plan = drawn_plan(np.random.default_rng(seed), seed)
        if plan is None or plan.windows_per_epoch > 70:
            continue
        seeds += 1
        cells = [cells_of(plan, n) for n in range(len(plan.areas))]
        legal = [enough(area, plan.window) for area in plan.areas]
        assert plan.windows_per_epoch == sum(map(len, cells)), seed
        rounds: dict[tuple[int, int], list] = defaultdict(list)
        given = Counter()
        for index in range(plan.windows_per_epoch):
            sample, visit = plan.at(0, index), plan.visit(0, index)
            block, (axis, training, _) = visit.block, plan.splits[sample.survey]
            cell = cells[sample.survey][block, visit.strata]
            assert all(o in origins for o, origins in zip(sample.origin, cell, strict=True)), seed
            assert legal[sample.survey][sample.origin[:2]], seed
            first, size = training[block]
            inside = min(plan.window.shape[axis], plan.areas[sample.survey].shape[axis])
            assert first <= sample.origin[axis] <= first + size - inside, seed
            rounds[sample.survey, visit.round].append((block, visit.strata))
            given[sample.survey] += 1
        assert [given[n] for n in range(len(plan.areas))] == plan.counts, seed
        for (survey, turn), visits in rounds.items():
            assert len(set(visits)) == len(visits), seed
            if turn < given[survey] // len(cells[survey]):
                assert set(visits) == set(cells[survey]), seed
                kinds["full"] += 1
        kinds["masked"] += any(not each.all() for each in legal)
        kinds["blocks"] += any(len(s.training) > 1 for s in plan.splits)
        kinds["several"] += len(plan.areas) > 1
        kinds["aligned"] += plan.window.align
        if seeds == 2500:
            break
    assert min(kinds.values()) > 200, kinds


def test_rounds_go_on_through_the_epochs() -> None:
    plan = sampler(Area((9, 9, 4), 5.0), Area((9, 9, 9), 1.0), shape=(3, 3, 3), held_out=0.2)
    cells = [cells_of(plan, n) for n in range(2)]
    rounds = defaultdict(list)
    for number in range(12 * plan.windows_per_epoch):
        visit = plan.visit(*divmod(number, plan.windows_per_epoch))
        rounds[visit.survey, visit.round].append((visit.block, visit.strata))
    for survey in range(2):
        turns = sorted(turn for which, turn in rounds if which == survey)
        assert len(turns) >= 3
        for turn in turns[:-1]:
            assert len(rounds[survey, turn]) == len(cells[survey])
            assert set(rounds[survey, turn]) == set(cells[survey])
    assert rounds[0, 0] != rounds[0, 1]


def test_each_epoch_and_each_round_has_an_order_of_its_own() -> None:
    plan = sampler(AREAS[0])
    total = plan.windows_per_epoch
    visits = [[plan.visit(epoch, n) for n in range(total)] for epoch in range(3)]
    slots = {tuple(v.drawn - epoch * total for v in each) for epoch, each in enumerate(visits)}
    cells = {tuple(v.cell for v in sorted(each, key=lambda v: v.drawn)) for each in visits}
    assert (len(slots), len(cells)) == (3, 3)


def chi_square(counts: np.ndarray, expected: np.ndarray | float) -> float:
    """In standard deviations from what independent draws give; draws without replacement stay below."""
    freedom = counts.size - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / math.sqrt(2 * freedom)


def test_every_origin_is_as_likely_as_another() -> None:
    # 5 legal origins in 3 strata along inline: cells of whole positions would be uneven by a factor of 2.
    plan = sampler(Area((7, 6, 5)), shape=(3, 2, 2), held_out=0)
    counts = np.zeros((5, 5, 4))
    for number in range(500 * plan.windows_per_epoch):
        counts[plan.train(number).origin] += 1
    assert plan.windows_per_epoch == 27
    assert counts.min() > 0
    assert chi_square(counts, 5 * 27) < 4


def test_aligned_windows_start_on_chunk_borders_each_as_likely_as_another() -> None:
    area = Area((23, 12, 9), chunks=(4, 3, 5))  # windows of whole chunks, of part of one, and of one and a bit
    plan = sampler(area, shape=(8, 2, 7), held_out=0, align=True)
    counts: Counter[tuple[int, int, int]] = Counter(plan.train(n).origin for n in range(500 * plan.windows_per_epoch))
    legal = list(itertools.product((0, 4, 8, 12, 15), (0, 1, 3, 4, 6, 7, 9, 10), (0, 1, 2)))
    assert set(counts) == set(legal)
    assert chi_square(np.array([counts[origin] for origin in legal]), 500 * plan.windows_per_epoch / len(legal)) < 4
    assert plan.describe().startswith(
        "survey: all 23 inlines x 12 crosslines are for training, nothing is held out; training windows start where they "
        "meet fewest chunks of 4 x 3 x 5, and at the ends of lines."
    )


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 90), st.integers(0, 90))
def test_aligned_windows_see_every_line(window: int, chunk: int, first: int, more: int) -> None:
    strata = Strata.of(first, window + more, window, chunk)
    origins = strata.origins(0, strata.strata).tolist()
    assert origins == legal_origins(first, window + more, window, chunk)
    assert {line for origin in origins for line in range(origin, origin + window)} == set(
        range(first, first + window + more)
    )
    assert len(origins) >= strata.strata  # so no stratum must give what another gives


def test_alignment_is_part_of_the_plan_only_where_it_is_asked_for() -> None:
    areas = [replace(AREAS[0], chunks=chunks) for chunks in (None, (16, 16, 64), (8, 16, 64))]
    assert len({sampler(area).plan for area in areas}) == 1
    assert len({sampler(area, align=True).plan for area in areas} | {sampler(areas[0]).plan}) == 4


def test_a_stretch_of_lines_without_a_chunk_border_gives_windows_at_its_ends() -> None:
    plan = sampler(Area((200, 50, 4), chunks=(44, 50, 4)), shape=(44, 50, 4), held_out=0.4, blocks=2, align=True)
    assert [tuple(lines) for lines in plan.splits[0].training] == [(0, 56), (100, 56)]
    drawn = Counter(plan.train(n).origin[0] for n in range(1000))
    assert set(drawn) == {0, 12, 100, 112}


def test_among_live_places_every_origin_of_a_cell_is_as_likely_as_another() -> None:
    mask = np.random.default_rng(3).random((19, 19)) < 0.5
    area = Area((19, 19, 1), trace_mask=mask)
    plan = sampler(area, shape=(10, 10, 1), held_out=0, min_live=0.45)
    legal = enough(area, plan.window)  # 10 x 10 origins in 2 x 2 cells of 5 x 5
    assert 0.2 < legal.mean() < 0.8
    turns = 3000
    counts = np.zeros((10, 10))
    for number in range(turns * plan.windows_per_epoch):
        counts[plan.train(number).origin[:2]] += 1
    assert not counts[~legal].any()
    for i, x in itertools.product((0, 5), (0, 5)):
        cell = np.s_[i : i + 5, x : x + 5]
        here = counts[cell][legal[cell]]
        assert here.sum() == turns
        assert abs(chi_square(here, turns / len(here))) < 4


def test_counting_live_places_and_having_all_of_them_draw_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = np.ones((40, 40), bool)
    mask[:4, :4] = False
    plan, without = (sampler(Area((40, 40, 9), trace_mask=m), shape=(7, 6, 4), min_live=0.9) for m in (mask, None))
    found = [plan.train(n) for n in range(400)]
    same = [a == b for a, b in zip(found, map(without.train, range(400)), strict=True)]
    assert 0.9 < sum(same) / 400 < 1
    monkeypatch.setattr(Live, "all", lambda *_: False)
    assert [plan.train(n) for n in range(400)] == found


def test_weights_are_respected_exactly_in_each_epoch() -> None:
    plan = sampler()
    total = plan.windows_per_epoch
    assert plan.counts == [round(total * 0.75), total - round(total * 0.75)]
    for epoch in (0, 1, 1000):
        found = Counter(plan.at(epoch, n).survey for n in range(total))
        assert [found[0], found[1]] == plan.counts


@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=9).filter(any), st.integers(0, 999))
def test_apportionment(weights: list[float], more: int) -> None:
    count = len(weights) + more
    shares = apportion(count, weights)
    assert sum(shares) == count
    assert all((share > 0) == (weight > 0) for share, weight in zip(shares, weights, strict=True))
    quotas = [count * weight / sum(weights) for weight in weights]
    if all(quota >= 1 or not weight for quota, weight in zip(quotas, weights, strict=True)):
        assert all(abs(share - quota) < 1 + 1e-6 for share, quota in zip(shares, quotas, strict=True))


def test_apportionment_by_largest_remainder() -> None:
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    assert apportion(10, [6, 3, 1]) == [6, 3, 1]
    assert apportion(100, [1000, 1, 0, 1]) == [98, 1, 0, 1]
    assert apportion(7, [0.1, 0.2, 0.4]) == [1, 2, 4]


def test_order_is_a_pure_function_of_seed_epoch_and_index() -> None:
    first, again = sampler(), sampler()
    total = first.windows_per_epoch
    numbers = [*range(50), total - 1, total, 3 * total + 5, 10**15]
    order = [first.train(n) for n in numbers]
    assert [again.train(n) for n in reversed(numbers)] == order[::-1]
    assert [again.at(*divmod(n, total)) for n in numbers] == order
    assert [(s.index, s.epoch) for s in order] == [(n, n // total) for n in numbers]
    assert [sampler(seed=8).train(n) for n in numbers] != order
    epochs = [[first.at(epoch, n).origin for n in range(total)] for epoch in range(2)]
    assert epochs[0] != epochs[1]


def test_order_is_the_same_everywhere_and_for_ever() -> None:
    # A resumed job must meet the same windows on any machine and any numpy.
    plan = sampler()
    assert [(s.survey, s.origin) for s in map(plan.train, (0, 1, 10**12))] == PINNED
    assert plan.plan == "74a7ae5123588003"


PINNED = [(1, (52, 17, 1)), (0, (47, 79, 9)), (0, (12, 23, 46))]


@pytest.mark.parametrize("data", [1, 2, 3, 6])
def test_order_does_not_depend_on_the_world(data: int) -> None:
    plan, batch, steps = sampler(), 6, 100  # more than an epoch
    orders = [RankOrder(batch, data, rank) for rank in range(data)]
    for step in range(steps):
        positions = range(step * (batch // data), (step + 1) * (batch // data))
        found = [plan.train(order.sample(p)) for order in orders for p in positions]
        assert found == [plan.train(n) for n in range(step * batch, (step + 1) * batch)]


def test_a_cursor_continues_where_it_was_taken() -> None:
    plan = sampler()
    for number in (0, 1, plan.windows_per_epoch - 1, plan.windows_per_epoch, 10**18 + 7):
        text = json.dumps(plan.cursor(number).to_json())
        assert len(text.encode()) <= 1024
        resumed = sampler()
        start = resumed.resume(Cursor.from_json(json.loads(text)))
        assert [resumed.train(start + n) for n in range(20)] == [plan.train(number + n) for n in range(20)]


def test_a_cursor_of_another_plan_is_refused() -> None:
    mask = np.ones((200, 40), bool)
    mask[3:30, 3:30] = False
    a, b = AREAS[0], replace(AREAS[1], trace_mask=mask)
    plan = sampler(a, b)
    other = mask.copy()
    other[190, 30] = False
    others = [
        sampler(a, b, seed=8), sampler(b, a), sampler(a), sampler(replace(a, weight=2.0), b),
        sampler(replace(a, shape=(76, 181, 269)), b), sampler(a, replace(b, trace_mask=other)), sampler(a, AREAS[1]),
        sampler(replace(a, held_out=True), b), sampler(a, b, shape=(16, 16, 32)), sampler(a, b, held_out=0.2),
        sampler(a, b, guard=1), sampler(a, b, min_live=0.2), sampler(a, b, held_out=0.3, blocks=2),
    ]  # fmt: skip
    assert len({plan.plan, *(o.plan for o in others)}) == len(others) + 1
    with pytest.raises(
        SurveyError,
        match=rf"^the order of windows is not the one that epoch 0, window 5 was reached in \(plan {others[0].plan}, "
        rf"not {plan.plan}\): the seed, .* have changed; restore them, or begin a new job$",
    ):
        others[0].resume(plan.cursor(5))
    same = [
        sampler(replace(a, name="moved"), b),
        sampler(a, b, clip=90),
        sampler(replace(a, trace_mask=np.ones((76, 181), bool)), b),
    ]
    assert {plan.plan} == {s.plan for s in same}


@pytest.mark.parametrize(
    "damaged", [None, [], {}, {"epoch": 0, "index": "1", "plan": "a"}, {"epoch": -1, "index": 1, "plan": "a"}]
)
def test_a_damaged_cursor_is_refused(damaged: object) -> None:
    with pytest.raises(SurveyError, match=r"^this is no cursor of the sampler: .*; the checkpoint is damaged"):
        Cursor.from_json(damaged)


def test_evaluation_covers_what_is_held_out_and_nothing_else() -> None:
    rng, masked = np.random.default_rng(5), 0
    for seed in range(600):
        plan = drawn_plan(rng, seed)
        if plan is None or plan.n_evaluation > 300:
            continue
        samples = [plan.evaluation(n) for n in range(plan.n_evaluation)]
        assert len(set(samples)) == len(samples)
        seen = [np.zeros(area.shape, bool) for area in plan.areas]
        for sample in samples:
            area, split = plan.areas[sample.survey], plan.splits[sample.survey]
            assert enough(area, plan.window)[sample.origin[:2]]
            inside = [min(n, w) for n, w in zip(area.shape, plan.window.shape, strict=True)]
            where = tuple(slice(o, o + n) for o, n in zip(sample.origin, inside, strict=True))
            seen[sample.survey][where] = True
            within = where[split.axis]
            assert any(first <= within.start and within.stop <= first + size for first, size in split.held_out)
        for survey, (area, split, found) in enumerate(zip(plan.areas, plan.splits, seen, strict=True)):
            held_out = np.zeros(area.shape[split.axis], bool)
            for first, size in split.held_out:
                held_out[first : first + size] = True
            lines = found.swapaxes(0, split.axis)
            assert not lines[~held_out].any()
            if area.trace_mask is None or not plan.window.min_live:
                assert lines[held_out].all()
            else:
                laid = {s.origin for s in samples if s.survey == survey}
                origins = list(tiles(area.shape, plan.window.shape))
                for first, size in split.held_out:
                    origins[split.axis] = [first + o for o in cover(size, plan.window.shape[split.axis])]
                    expected = {o for o in itertools.product(*origins) if enough(area, plan.window)[o[:2]]}
                    assert expected <= laid
                    laid -= expected
                assert not laid
                masked += 1
    assert masked > 50


def test_evaluation_takes_the_fewest_windows() -> None:
    plan = sampler(Area((64, 20, 30)), shape=(8, 8, 10), held_out=0.25)  # 16 lines: they divide along two axes
    assert plan.n_evaluation == 2 * 3 * 3
    origins = sorted(plan.evaluation(n).origin for n in range(18))
    assert origins == sorted(itertools.product((48, 56), (0, 6, 12), (0, 10, 20)))


def test_first_evaluation_windows_are_spread_out() -> None:
    plan = sampler(AREAS[0])
    origins = np.array([plan.evaluation(n).origin for n in range(8)])
    assert len(set(origins[:, 2])) >= 4  # of the five depths
    assert len(set(origins[:, 0])) >= 3


def test_a_whole_survey_held_out() -> None:
    plan = sampler(AREAS[0], replace(AREAS[1], held_out=True), held_out=0)
    assert plan.counts == [plan.windows_per_epoch, 0]
    assert {plan.train(n).survey for n in range(plan.windows_per_epoch)} == {0}
    assert {plan.evaluation(n).survey for n in range(plan.n_evaluation)} == {1}
    assert plan.n_evaluation == 13 * 3 * 2
    with pytest.raises(SurveyError, match=r"^every survey is held out for evaluation; leave one for training$"):
        sampler(*(replace(area, held_out=True) for area in AREAS))


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 1, 1), (1, 5, 1), (1, 1, 5), (4, 3, 2)])
def test_surveys_as_large_as_the_window_and_lines_of_one_sample(shape: tuple[int, int, int]) -> None:
    whole = sampler(Area(shape), shape=shape, held_out=0)
    assert whole.windows_per_epoch == 1
    assert [whole.train(n).origin for n in range(3)] == [(0, 0, 0)] * 3
    voxels = sampler(Area(shape), shape=(1, 1, 1), held_out=0)
    found = sorted(voxels.train(n).origin for n in range(voxels.windows_per_epoch))
    assert found == list(itertools.product(*map(range, shape)))


def test_a_padded_survey_has_one_origin() -> None:
    mask = np.ones((30, 5), bool)
    mask[:12] = False
    plan = sampler(Area((30, 5, 3), trace_mask=mask), shape=(8, 8, 8), pad=True, min_live=1)
    assert plan.splits[0] == (0, ((0, 22),), ((22, 8),))
    for number in range(20):
        i, x, t = plan.train(number).origin
        assert 12 <= i <= 14
        assert (x, t) == (0, 0)
    assert [plan.evaluation(n).origin for n in range(plan.n_evaluation)] == [(22, 0, 0)]


def test_too_few_live_traces() -> None:
    mask = np.zeros((76, 181), bool)
    mask[::4] = True
    area = replace(AREAS[0], trace_mask=mask)
    with pytest.raises(
        SurveyError,
        match=r"^a.mdio: window.min_live 0.3 asks for live traces in that share of a window's 16 x 16, and no window "
        r"for training has more than 25.0%; take window.min_live at most 0.25, or leave out what has no data$",
    ):
        sampler(area, min_live=0.3)
    assert sampler(area, min_live=0.25).windows_per_epoch == sampler(AREAS[0]).windows_per_epoch
    mask = np.ones((76, 181), bool)
    mask[:, -19:] = False
    with pytest.raises(SurveyError, match=r"^the surveys: .* no window held out for evaluation has more than 0.0%"):
        sampler(replace(AREAS[0], trace_mask=mask))
    assert sampler(replace(AREAS[0], trace_mask=mask), min_live=0).n_evaluation > 0


def test_an_all_live_mask_and_min_live_0_cost_nothing() -> None:
    mask = np.random.default_rng(0).random((76, 181)) < 0.5
    plans = [
        sampler(AREAS[0]),
        sampler(replace(AREAS[0], trace_mask=np.ones((76, 181), bool))),
        sampler(replace(AREAS[0], trace_mask=mask), min_live=0),
    ]
    assert len({p.plan for p in plans}) == 1
    assert len({tuple(p.train(n) for n in range(50)) for p in plans}) == 1


def test_a_plan_of_millions_of_windows_is_held_in_little_memory() -> None:
    tracemalloc.start()
    try:
        areas = [Area((4000, 4000, 2000), 1 + n % 3, f"s{n}") for n in range(40)]
        plan = sampler(*areas, shape=(32, 32, 64))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert plan.windows_per_epoch > 10**7
    assert peak < 2**20
    assert plan.train(10**7).epoch == 0


def test_description() -> None:
    assert sampler().describe() == (
        "a.mdio: crosslines 1-162 of 181 are for training, the last 19 are held out (50 evaluation windows). "
        "b.mdio: inlines 1-180 of 200 are for training, the last 20 are held out (12 evaluation windows). "
        "An epoch is 347 training windows."
    )
    assert "all 76 inlines x 181 crosslines are for training, nothing is held out." in sampler(held_out=0).describe()
    assert "inlines 1-176 of 200 are for training, the next 4 are left out, the last 20" in sampler(guard=4).describe()
    blocks = sampler(AREAS[1], blocks=2, guard=3, held_out=0.2).describe()
    assert blocks.startswith(
        "b.mdio: of 200 inlines in 2 stretches, 151 are for training, 40 are held out (24 evaluation windows), 9 are "
        "between them."
    )
    mask = np.ones((200, 40), bool)
    mask[:100] = False
    plan = sampler(AREAS[0], replace(AREAS[1], trace_mask=mask))
    lost = 347 - plan.windows_per_epoch
    assert f"; {lost} of 72 cells are left out, where fewer than 10% of traces exist." in plan.describe()
    assert "b.mdio: all of it is held out (78 evaluation windows)." in (
        sampler(AREAS[0], replace(AREAS[1], held_out=True)).describe()
    )


def test_numbers_that_do_not_exist() -> None:
    with pytest.raises(SurveyError, match=r"^window\.held_out is 0: no lines are kept for evaluation"):
        sampler(held_out=0).evaluation(0)
    with pytest.raises(SurveyError, match=r"^there are 62 evaluation windows; number 62 is not among them"):
        sampler().evaluation(62)
    for epoch, index in ((0, 347), (0, -1), (-1, 0)):
        with pytest.raises(SurveyError, match=rf"an epoch has 347 .* number {index} of epoch {epoch} is not"):
            sampler().at(epoch, index)
