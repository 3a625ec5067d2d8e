import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfm.spec import Optimiser
from sfm.train.schedule import learning_rate


def test_warms_up_linearly_and_ends_at_the_least_rate():
    options = Optimiser(lr=1.0, min_lr=0.1, warmup_steps=4)
    rates = [learning_rate(step, 11, options) for step in range(11)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[7] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)


@given(steps=st.integers(1, 200), share=st.floats(0, 0.99))
def test_never_leaves_its_bounds_and_falls_after_the_peak(steps, share):
    options = Optimiser(lr=2e-3, min_lr=1e-5, warmup_steps=int(share * steps))
    rates = [learning_rate(step, steps, options) for step in range(steps)]
    assert all(0 < rate <= options.lr for rate in rates)
    tail = rates[options.warmup_steps :]
    assert tail == sorted(tail, reverse=True)
