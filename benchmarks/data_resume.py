"""CPU time of a resume in mid-epoch: the order of all row groups, and the rows of the next step.

One of 48 ranks, 64 lanes, windows of 20,000 rows; row groups of 10,000 rows.
"""

import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from spotfit.data.order import EpochOrder, OrderSettings
from spotfit.data.source import int_array

SETTINGS = OrderSettings(seed=1, lanes=64, window_rows=20_000, shuffle="rows")


def resume_s(row_groups: int) -> float:
    """Return the CPU seconds until the windows of the next step are known and permuted."""
    started_s = time.process_time()
    order = EpochOrder(int_array(np.full(row_groups, 10_000)), SETTINGS, epoch=3)
    for rows in order.rank_rows(order.row_count // 2, 4096, 48, 17):
        order.permutation(rows.lane, order.window_at(rows.lane, rows.first))
    return time.process_time() - started_s


if __name__ == "__main__":
    for count in (10_000, 100_000, 1_000_000):
        runs = [resume_s(count) for _ in range(7)]
        print(f"{count * 10_000:>14,} rows: {median(runs):.4f} s, at most {max(runs):.4f} s")
