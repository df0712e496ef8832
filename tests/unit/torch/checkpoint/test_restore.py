"""A restore loads a complete state or changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from spotfit.checkpoint.reader import SavedState, read_chunks
from spotfit.core.errors import ConfigError
from spotfit.torch import Checkpointer
from spotfit.torch.checkpoint.restore import RestoreOperation
from spotfit.torch.checkpoint.training_state import TrainingState
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession


class Counted:
    """A user-defined stateful object."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def a_training(fill: float, count: int = 0) -> TrainingState:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for weight in model.parameters():
        nn.init.constant_(weight, fill)
        weight.grad = torch.full_like(weight, fill)
    optimizer.step()
    return TrainingState(model, [optimizer], {"counted": Counted(count)})


def values_of(training: TrainingState) -> list[Any]:
    """Return all values of the state."""
    (optimizer,) = training.optimizers
    tensors = [*training.model.parameters()]
    tensors += [one["exp_avg"] for one in optimizer.state.values()]
    return [tensor.tolist() for tensor in tensors]


def make_operation(
    training: TrainingState, *, has_checkpoint: bool = True, **changes: Any
) -> RestoreOperation:
    options: dict[str, Any] = {
        "per_rank": {},
        "position": None,
        "rank": 0,
        "world_size": 1,
        **changes,
    }
    per_rank, position = options.pop("per_rank"), options.pop("position")
    return RestoreOperation(
        training,
        per_rank,
        position,
        has_checkpoint=has_checkpoint,
        resume_datasets=lambda _positions: None,
        **options,
    )


@pytest.fixture
def saved() -> Iterator[SavedState]:
    session = LocalSession("run")
    training_api.set_session(session)
    before = a_training(7.0, count=7)
    Checkpointer(
        model=before.model,
        optimizer=before.optimizers,
        extra=before.stateful_objects,
        per_rank={"counter": Counted(8)},
    ).save()
    found = session.snapshot_channel.open_checkpoint("checkpoint_000000")
    assert found is not None
    yield found
    training_api.clear_session()
    shutil.rmtree(session.snapshot_channel.segment_dirs[0].parent, ignore_errors=True)


def test_a_restored_state_equals_the_saved_one(saved: SavedState) -> None:
    training, counter = a_training(1.0), Counted()
    operation = make_operation(training, per_rank={"counter": counter})
    planned = operation.plan(saved)
    operation.check_compatibility([planned.compatibility])
    read_chunks(planned.reads)
    assert operation.apply(saved) == 0
    assert values_of(training) == values_of(a_training(7.0))
    assert (training.stateful_objects["counted"].count, counter.count) == (7, 8)


@pytest.mark.parametrize("read", [False, True])
def test_a_rolled_back_restore_changes_nothing(saved: SavedState, read: bool) -> None:
    """A snapshot in memory may be corrupt while there is no checkpoint."""
    training = a_training(1.0, count=1)
    operation = make_operation(training, has_checkpoint=False)
    planned = operation.plan(saved)
    if read:
        read_chunks(planned.reads)
    operation.roll_back()
    assert values_of(training) == values_of(a_training(1.0))
    assert training.stateful_objects["counted"].count == 1


def test_a_moved_component_is_rejected_before_reading(saved: SavedState) -> None:
    training = a_training(1.0)._replace(stateful_objects={})
    operation = make_operation(training, per_rank={"counted": Counted()})
    with pytest.raises(ConfigError, match="'counted' was saved under extra="):
        operation.plan(saved)
    assert values_of(training) == values_of(a_training(1.0))


def test_per_rank_state_is_rejected_at_another_world_size(saved: SavedState) -> None:
    with pytest.raises(
        ConfigError, match=r"counter was saved under per_rank= at world size 1 .* world size 2"
    ):
        make_operation(a_training(1.0), per_rank={"counter": Counted()}, world_size=2).plan(saved)
