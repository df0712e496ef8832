"""A saved state comes into a training whole, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from spotfit.checkpoint.saved import Saved, read_alone
from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.state import Training
from spotfit.torch import Checkpointer
from spotfit.torch.restoring import Restoring
from spotfit.worker import current
from spotfit.worker.local import LocalSession


class Counted:
    """An object of the user's."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def a_training(fill: float, count: int = 0) -> Training:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for weight in model.parameters():
        nn.init.constant_(weight, fill)
        weight.grad = torch.full_like(weight, fill)
    optimizer.step()
    return Training(model, [optimizer], {"counted": Counted(count)})


def known(training: Training) -> list[Any]:
    """All numbers of it."""
    (optimizer,) = training.optimizers
    tensors = [*training.model.parameters()]
    tensors += [one["exp_avg"] for one in optimizer.state.values()]
    return [tensor.tolist() for tensor in tensors]


def part(training: Training, *, surely: bool = True, **changes: Any) -> Restoring:
    how: dict[str, Any] = {"own": {}, "place": None, "rank": 0, "world_size": 1, **changes}
    own, place = how.pop("own"), how.pop("place")
    return Restoring(training, own, place, surely=surely, **how)


@pytest.fixture
def saved() -> Iterator[Saved]:
    session = LocalSession("run")
    current.enter(session)
    before = a_training(7.0, count=7)
    Checkpointer(
        model=before.model,
        optimizer=before.optimizers,
        extra=before.others,
        own={"mine": Counted(8)},
    ).save()
    found = session.snapshots.open("checkpoint_000000")
    assert found is not None
    yield found
    current.leave()
    shutil.rmtree(session.snapshots.folders[0].parent, ignore_errors=True)


def test_what_was_saved_is_what_it_goes_on_from(saved: Saved) -> None:
    training, mine = a_training(1.0), Counted()
    restoring = part(training, own={"mine": mine})
    planned = restoring.planned(saved)
    restoring.judge([planned.fit])
    read_alone(planned.orders)
    assert restoring.adopt(saved) == 0
    assert known(training) == known(a_training(7.0))
    assert (training.others["counted"].count, mine.count) == (7, 8)


@pytest.mark.parametrize("read", [False, True])
def test_who_does_not_go_on_from_it_has_lost_nothing(saved: Saved, read: bool) -> None:
    """A state in memory may be torn, and no checkpoint there."""
    training = a_training(1.0, count=1)
    restoring = part(training, surely=False)
    planned = restoring.planned(saved)
    if read:
        read_alone(planned.orders)
    restoring.undo()
    assert known(training) == known(a_training(1.0))
    assert training.others["counted"].count == 1


def test_what_moved_is_refused_before_anything_is_read(saved: Saved) -> None:
    training = a_training(1.0)._replace(others={})
    restoring = part(training, own={"counted": Counted()})
    with pytest.raises(ConfigError, match="'counted' was kept in extra"):
        restoring.planned(saved)
    assert known(training) == known(a_training(1.0))


def test_what_is_each_ranks_own_is_refused_by_another_number(saved: Saved) -> None:
    with pytest.raises(ConfigError, match="mine was kept by 1 ranks, each its own, and 2"):
        part(a_training(1.0), own={"mine": Counted()}, world_size=2).planned(saved)
