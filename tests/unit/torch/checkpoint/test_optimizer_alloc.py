"""Optimizer state is restored before the first step, without a dummy step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from spotfit.checkpoint.format import SnapshotIndex, split_into_chunks
from spotfit.checkpoint.reader import MemoryShardReader, SavedState
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.core.errors import ConfigError
from spotfit.torch.checkpoint.optimizer_alloc import (
    allocate_optimizer_states,
    restore_optimizer_states,
)
from spotfit.torch.checkpoint.save_plan import SavePlanCache, encode_values
from spotfit.torch.checkpoint.tensor_arena import TensorArena
from spotfit.torch.checkpoint.training_state import TrainingState
from tests.unit.torch.checkpoint.loading import load_state

Make = Callable[[nn.Module], Optimizer]


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def factored(model: nn.Module) -> Optimizer:
    """Adafactor stores row and column statistics, whose shapes differ from the weight's."""
    return torch.optim.Adafactor(model.parameters())


def listed(model: nn.Module) -> Optimizer:
    """LBFGS stores the state of all weights in lists under the first weight."""
    return torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)


def training(make: Make, *, steps: int, unused: bool = False) -> TrainingState:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
    if unused:
        model.register_parameter("unused", nn.Parameter(torch.ones(5)))
    optimizer = make(model)
    return trained(TrainingState(model, [optimizer]), steps)


def trained(training: TrainingState, steps: int) -> TrainingState:
    optimizer = training.optimizers[0]

    def loss() -> Any:
        optimizer.zero_grad()
        loss = training.model(torch.ones(5, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(loss)
    return training


def saved_of(training: TrainingState, folder: Path) -> SavedState:
    share = SavePlanCache(0, lambda value: [value]).plan(training.state_dict())
    arena = TensorArena([folder], lambda where: where / "segment")
    arena.reserve(share.pieces)
    arena.copy(share.tensors)
    values, chunks = encode_values(share.values), split_into_chunks(share.pieces)
    arena.publish(
        SnapshotIndex(
            rank=0,
            world_size=1,
            step=2,
            pieces=share.pieces,
            value_keys=share.value_keys,
            encoded_values=values,
            chunks=chunks,
        )
    )
    return SavedState([MemoryShardReader(ShmSegment.open(arena.path))])


def restored(training: TrainingState, saved: SavedState) -> None:
    state = training.state_dict()
    load_state(state, saved)
    training.load_state_dict(state)


def comparable_state(training: TrainingState) -> Any:
    """Return the state in a comparable form that does not depend on the order of insertion."""
    state = training.state_dict()
    return pformat({"model": dict(state["model"]), "optimizer": state["optimizer"]})


@pytest.mark.parametrize("make", [adam, factored, listed])
def test_saved_state_is_read_into_allocated_tensors(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = training(make, steps=2)
    saved = saved_of(before, tmp_path)
    again = training(make, steps=0)
    (optimizer,) = again.optimizers
    monkeypatch.setattr(type(optimizer), "step", lambda *_, **__: 1 / 0)
    assert allocate_optimizer_states(again, saved).keys() == {optimizer}
    restored(again, saved)
    monkeypatch.undo()
    assert comparable_state(again) == comparable_state(before)
    assert comparable_state(trained(again, 2)) == comparable_state(trained(before, 2))


def test_a_weight_without_saved_state_gets_none(tmp_path: Path) -> None:
    """A dummy step would create state that was not saved."""
    before = training(adam, steps=2, unused=True)
    saved = saved_of(before, tmp_path)
    again = training(adam, steps=0, unused=True)
    allocate_optimizer_states(again, saved)
    restored(again, saved)
    assert comparable_state(again) == comparable_state(before)


def test_existing_state_of_the_same_layout_is_reused(tmp_path: Path) -> None:
    saved = saved_of(training(adam, steps=2), tmp_path)
    again = training(adam, steps=1)
    before = {id(value) for state in again.optimizers[0].state.values() for value in state.values()}
    assert not allocate_optimizer_states(again, saved)
    after = {id(value) for state in again.optimizers[0].state.values() for value in state.values()}
    assert after == before


def test_state_of_another_layout_is_replaced(tmp_path: Path) -> None:
    """The history of LBFGS grows with every step."""
    before = training(listed, steps=2)
    saved = saved_of(before, tmp_path)
    again = training(listed, steps=4)
    unchanged = comparable_state(again)
    allocated = allocate_optimizer_states(again, saved)
    assert allocated
    restore_optimizer_states(allocated)
    assert comparable_state(again) == unchanged
    allocate_optimizer_states(again, saved)
    restored(again, saved)
    assert comparable_state(trained(again, 2)) == comparable_state(trained(before, 2))


def test_empty_state_is_restored_after_a_roll_back(tmp_path: Path) -> None:
    """A roll-back to the state before the first step."""
    before = training(adam, steps=0)
    saved = saved_of(before, tmp_path)
    again = training(adam, steps=2)
    allocate_optimizer_states(again, saved)
    restored(again, saved)
    assert not again.optimizers[0].state
    assert comparable_state(again) == comparable_state(before)


class Counted(torch.optim.SGD):
    """An optimizer whose state has integer keys, which are saved as strings."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight].setdefault("seen", {0: torch.zeros(3)})
                    state[0] += 1


def counted(model: nn.Module) -> Optimizer:
    return Counted(model.parameters(), lr=0.1)


def test_an_unknown_layout_is_created_by_one_dummy_step(tmp_path: Path) -> None:
    before = training(counted, steps=2, unused=True)
    saved = saved_of(before, tmp_path)
    again = training(counted, steps=0, unused=True)
    gradient = torch.ones_like(next(again.model.parameters()))
    next(again.model.parameters()).grad = gradient
    allocate_optimizer_states(again, saved)
    assert next(again.model.parameters()).grad is gradient
    restored(again, saved)
    assert comparable_state(again) == comparable_state(before)
    assert [state["seen"].keys() for state in again.optimizers[0].state.values()] == [{0}] * 4


@pytest.mark.parametrize("broken", [lambda *_, **__: 1 / 0, lambda *_, **__: None])
def test_an_optimizer_that_cannot_create_the_layout_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable[..., Any]
) -> None:
    saved = saved_of(training(counted, steps=2), tmp_path)
    again = training(counted, steps=0)
    monkeypatch.setattr(Counted, "step", broken)
    with pytest.raises(ConfigError, match=r"cannot be assigned to Counted"):
        allocate_optimizer_states(again, saved)


@pytest.mark.usefixtures("group")
def test_sharded_optimizer_state_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sharded(steps: int) -> TrainingState:
        torch.manual_seed(3)
        model = nn.Linear(3, 2)
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        return trained(TrainingState(model, [adam(model)]), steps)

    before = sharded(2)
    saved = saved_of(before, tmp_path)
    again = sharded(0)
    monkeypatch.setattr(torch.optim.Adam, "step", lambda *_, **__: 1 / 0)
    assert len(allocate_optimizer_states(again, saved)) == 1
    averages = [state["exp_avg"] for state in again.optimizers[0].state.values()]
    assert all(type(average) is DTensor for average in averages)
    restored(again, saved)
    assert comparable_state(again) == comparable_state(before)


def test_a_failed_allocation_changes_no_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(steps: int) -> TrainingState:
        """Two optimizers: the first is allocated, the second needs a dummy step."""
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
        optimizers = [adam(model[0]), counted(model[1])]
        for _ in range(steps):
            model(torch.ones(3)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        return TrainingState(model, optimizers)

    saved = saved_of(two(2), tmp_path)
    again = two(0)
    monkeypatch.setattr(Counted, "step", lambda *_, **__: 1 / 0)
    with pytest.raises(ConfigError, match=r"cannot be assigned to Counted"):
        allocate_optimizer_states(again, saved)
    assert [dict(one.state) for one in again.optimizers] == [{}, {}]


def test_an_optimizer_that_was_not_saved_keeps_its_state(tmp_path: Path) -> None:
    before = training(adam, steps=2)
    saved = saved_of(before._replace(optimizers=()), tmp_path)
    again = training(adam, steps=1)
    state = comparable_state(again)
    assert not allocate_optimizer_states(again, saved)
    assert comparable_state(again) == state


def newer(model: nn.Module) -> Optimizer:
    """An optimizer of a newer torch with one more option."""
    optimizer = adam(model)
    optimizer.param_groups[0]["exact"] = True
    return optimizer


def test_an_option_of_a_later_torch_is_accepted(tmp_path: Path) -> None:
    before = training(adam, steps=2)
    again = training(newer, steps=0)
    saved = saved_of(before, tmp_path)
    allocate_optimizer_states(again, saved)
    state = again.state_dict()
    load_state(state, saved)
    again.load_state_dict(state)
    assert again.optimizers[0].param_groups[0].pop("exact") is True
    assert comparable_state(again) == comparable_state(before)


def adamax(model: nn.Module) -> Optimizer:
    """Adamax has only options that Adam also has, but other state."""
    return torch.optim.Adamax(model.parameters())


def test_another_class_with_additional_options_takes_a_dummy_step(tmp_path: Path) -> None:
    saved = saved_of(training(adamax, steps=2), tmp_path)
    again = training(adam, steps=1)
    unchanged = comparable_state(again)
    with pytest.raises(ConfigError, match=r"assigned to Adam: .* did not create all"):
        allocate_optimizer_states(again, saved)
    assert comparable_state(again) == unchanged


def radam(model: nn.Module) -> Optimizer:
    return torch.optim.RAdam(model.parameters())


def nadam(model: nn.Module) -> Optimizer:
    """NAdam has the state of RAdam and more."""
    return torch.optim.NAdam(model.parameters())


def test_state_that_only_another_class_has_is_reported_missing(tmp_path: Path) -> None:
    saved = saved_of(training(radam, steps=2), tmp_path)
    again = training(nadam, steps=0)
    allocate_optimizer_states(again, saved)
    with pytest.raises(ConfigError, match=r"mu_product, .* is missing from the checkpoint"):
        load_state(again.state_dict(), saved)
