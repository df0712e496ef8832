"""PreemptionInfo: sorted helpers, and nobody changes it."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from spotfit.model.preemption import PreemptionInfo

INFO = PreemptionInfo(1_000, {"node-b": [3, 2], "node-a": [1]})


def test_it_tells_nodes_and_ranks_in_order() -> None:
    assert INFO.preempted_node_ids == ["node-a", "node-b"]
    assert INFO.preempted_ranks == [1, 2, 3]


def test_it_is_frozen_and_travels_in_errors() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        INFO.deadline_ms = 5  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(INFO)) == INFO
