"""How the tokens of a sample are shared: what the masks give, and with `mask.even` the same to every rank."""

from hypothesis import assume, given
from hypothesis import strategies as st

from sfm import plan
from sfm.model.masking import draw_mask
from sfm.plan.shares import shares, slab_rows
from sfm.spec import SpecError, parse_spec, visible_tokens
from sfm.train.driver import size_line

PATCH = (2, 1, 3)


def job(grid, degree, ratio, even, registers, share):
    cross = {"decoder_attention": "cross", "decode_share": share} if share < 1 else {}
    return parse_spec(
        {
            "surveys": [{"url": "unused"}],
            "window": {"shape": [n * p for n, p in zip(grid, PATCH, strict=True)]},
            "model": {"preset": "tiny", "patch": PATCH, "registers": registers, **cross},
            "mask": {"ratio": ratio, "even": even},
            "parallel": {"workers": degree, "context": degree},
        }
    )


RATIOS, SHARES = st.floats(0.02, 0.98), st.sampled_from([0.1, 0.37, 0.5, 1.0])


@given(
    rows=st.integers(1, 6),
    rest=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    degree=st.integers(1, 8),
    ratio=RATIOS,
    registers=st.integers(0, 3),
    share=SHARES,
)
def test_even_gives_every_rank_the_same_at_the_nearest_ratio(rows, rest, degree, ratio, registers, share):
    grid = (rows * degree, *rest)
    tokens = grid[0] * rest[0] * rest[1]
    asked = visible_tokens(tokens, ratio)
    possible = [n for n in range(degree, tokens, degree) if grid[0] <= n <= tokens - grid[0]]
    assume(grid[0] <= asked <= tokens - grid[0])
    spec = job(grid, degree, ratio, True, registers * degree, share)
    for lengths in shares(spec)._replace(registers=[len(own) for own in shares(spec).registers]):
        assert len(lengths) == degree
        assert len(set(lengths)) == 1
    assert abs(spec.visible - asked) == min(abs(n - asked) for n in possible)
    assert visible_tokens(tokens, spec.mask_ratio) == spec.visible
    assert 0 < spec.mask_ratio < 1


@given(
    grid=st.tuples(st.integers(1, 12), st.integers(1, 7), st.integers(1, 7)),
    degree=st.integers(1, 8),
    ratio=RATIOS,
    even=st.booleans(),
    registers=st.integers(0, 9),
    share=SHARES,
)
def test_shares_are_the_lengths_of_the_masks(grid, degree, ratio, even, registers, share):
    try:
        spec = job(grid, degree, ratio, even, registers, share)
    except SpecError:
        assume(False)
    part = shares(spec)
    assert [n for own in part.registers for n in own] == list(range(registers))
    for rank in range(degree):
        rows, own = slab_rows(grid[0], degree, rank), len(part.registers[rank])
        visible, predicted = draw_mask(grid, spec.mask_ratio, 3, 4, rows, share)
        assert (part.encoder[rank], part.predicted[rank]) == (len(visible) + own, len(predicted))
        whole = len(rows) * grid[1] * grid[2] + own
        lengths = (len(predicted), part.encoder[rank]) if share < 1 else (whole, whole)
        assert (part.queries[rank], part.keys[rank]) == lengths


def test_another_ratio_than_was_asked_for_is_told():
    asked = {"grid": (6, 5, 5), "degree": 3, "ratio": 0.75, "registers": 0, "share": 1.0}  # 37 of 150 visible
    adjusted = job(even=True, **asked)
    assert (adjusted.visible, adjusted.mask_ratio) == (36, 0.76)
    assert size_line(adjusted).endswith("mask.even makes mask.ratio 0.75 0.76: 36 tokens visible")
    for untouched in (job(even=False, **asked), job(even=True, **asked | {"grid": (6, 4, 5)})):  # 30 of 120 are even
        assert "mask.even" not in size_line(untouched)


def test_registers_are_parameters():
    one, two = (job((4, 3, 3), 1, 0.5, False, registers, 1.0) for registers in (0, 5))
    assert plan.parameters(two) - plan.parameters(one) == 5 * two.model.encoder_size.width
