"""The order of samples does not depend on the number of workers."""

from hypothesis import given
from hypothesis import strategies as st

from sfm.feed.order import RankOrder


@given(per_rank=st.integers(1, 5), data=st.integers(1, 6), steps=st.integers(1, 5))
def test_every_step_holds_its_samples_at_any_degree(per_rank, data, steps):
    batch = per_rank * data
    orders = [RankOrder(batch, data, rank) for rank in range(data)]
    for step in range(steps):
        found = [order.sample(p) for order in orders for p in range(step * per_rank, (step + 1) * per_rank)]
        assert found == list(range(step * batch, (step + 1) * batch))
