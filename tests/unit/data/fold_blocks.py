"""The value of an aggregate over blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from spotfit.data.aggregate_base import fold_all


def fold(aggregate: Any, blocks: Iterable[pa.Table]) -> Any:
    return fold_all([aggregate], lambda _columns: blocks)[aggregate.name]
