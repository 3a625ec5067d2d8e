"""Which tokens are visible: drawn per patch row, so that no context-parallel rank has more work than another.

The mask of a sample is a pure function of (seed, index). Each patch row along inline (a stratum) draws
its own permutation from a counter-based generator, so a rank draws the rows of its slab alone and
still agrees with every other rank, at any degree.
"""

from __future__ import annotations

import numpy as np

from sfm.plan.shares import predicted_per_row, visible_per_row

_DOMAIN = 0x6D61736B  # keeps the masks' random numbers apart from other uses of the same seed


def draw_mask(
    grid: tuple[int, int, int], ratio: float, seed: int, index: int, rows: range | None = None, share: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the mask of sample `index`, or the part of it in patch `rows`.

    Args:
        share: of the masked tokens of each row, how many to return: rounded to nearest, at least one. Rows keep
            within one token of each other, so ranks keep equal work; who is visible does not depend on it.

    Returns:
        (visible, masked): ascending int64 token numbers in the whole window; with all of the `share`, together
        every token of `rows`.
    """
    per_row = grid[1] * grid[2]
    counts, predicted = visible_per_row(grid, ratio), predicted_per_row(grid, ratio, share)
    key = np.array([seed, index], dtype=np.uint64)
    visible, masked = [], []
    for row in rows if rows is not None else range(grid[0]):
        bits = np.random.Philox(key=key, counter=[0, 0, row, _DOMAIN])
        order = np.random.Generator(bits).permutation(per_row) + row * per_row
        visible.append(np.sort(order[: counts[row]]))
        masked.append(np.sort(order[counts[row] :][: predicted[row]]))
    return np.concatenate(visible), np.concatenate(masked)
