"""Optimizers that never took a step get back what they knew, and take none for it."""

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

from spotfit.checkpoint.saved import InMemory, Saved
from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import Index, chunks_of
from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.arena import Arena
from spotfit.frameworks.torch.reading import load_into
from spotfit.frameworks.torch.room import give_room, take_away
from spotfit.frameworks.torch.shares import Shares, plain
from spotfit.frameworks.torch.state import Training

Make = Callable[[nn.Module], Optimizer]


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def factored(model: nn.Module) -> Optimizer:
    """It keeps rows and columns of a weight, not its shape."""
    return torch.optim.Adafactor(model.parameters())


def listed(model: nn.Module) -> Optimizer:
    """What it keeps of all weights lies in lists, beside one of them."""
    return torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)


def training(make: Make, *, steps: int, unused: bool = False) -> Training:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
    if unused:
        model.register_parameter("unused", nn.Parameter(torch.ones(5)))
    optimizer = make(model)
    return trained(Training(model, [optimizer]), steps)


def trained(training: Training, steps: int) -> Training:
    optimizer = training.optimizers[0]

    def loss() -> Any:
        optimizer.zero_grad()
        loss = training.model(torch.ones(5, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(loss)
    return training


def saved_of(training: Training, folder: Path) -> Saved:
    share = Shares(0, lambda mine: [mine]).of(training.state())
    arena = Arena([folder], lambda where: where / "segment")
    arena.fit(share.pieces)
    arena.take(share.tensors)
    values, chunks = plain(share.values), chunks_of(share.pieces)
    arena.finish(Index(0, 1, 2, share.pieces, share.leaves, values, chunks=chunks))
    return Saved([InMemory(Segment.open(arena.path))])


def restored(training: Training, saved: Saved) -> None:
    state = training.state()
    load_into(state, saved)
    training.adopt(state)


def told(training: Training) -> Any:
    """All it knows, comparable, in whatever order it was come to know."""
    known = training.state()
    return pformat({"model": dict(known["model"]), "optimizer": known["optimizer"]})


@pytest.mark.parametrize("make", [adam, factored, listed])
def test_what_was_kept_is_read_into_its_place(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = training(make, steps=2)
    saved = saved_of(before, tmp_path)
    again = training(make, steps=0)
    (optimizer,) = again.optimizers
    monkeypatch.setattr(type(optimizer), "step", lambda *_, **__: 1 / 0)
    assert give_room(again, saved).keys() == {optimizer}
    restored(again, saved)
    monkeypatch.undo()
    assert told(again) == told(before)
    assert told(trained(again, 2)) == told(trained(before, 2))


def test_a_weight_that_never_learned_has_nothing_to_get_back(tmp_path: Path) -> None:
    """A step of nothing would make up what was never saved."""
    before = training(adam, steps=2, unused=True)
    saved = saved_of(before, tmp_path)
    again = training(adam, steps=0, unused=True)
    give_room(again, saved)
    restored(again, saved)
    assert told(again) == told(before)


def test_who_has_learned_keeps_its_places(tmp_path: Path) -> None:
    saved = saved_of(training(adam, steps=2), tmp_path)
    again = training(adam, steps=1)
    before = {id(value) for known in again.optimizers[0].state.values() for value in known.values()}
    assert not give_room(again, saved)
    after = {id(value) for known in again.optimizers[0].state.values() for value in known.values()}
    assert after == before


def test_who_knows_something_of_another_form_has_room_for_what_was_saved(tmp_path: Path) -> None:
    """LBFGS looks back at more steps with every step."""
    before = training(listed, steps=2)
    saved = saved_of(before, tmp_path)
    again = training(listed, steps=4)
    unchanged = told(again)
    room = give_room(again, saved)
    assert room
    take_away(room)
    assert told(again) == unchanged
    give_room(again, saved)
    restored(again, saved)
    assert told(trained(again, 2)) == told(trained(before, 2))


def test_who_knew_nothing_then_knows_nothing_again(tmp_path: Path) -> None:
    """To go back before the first step."""
    before = training(adam, steps=0)
    saved = saved_of(before, tmp_path)
    again = training(adam, steps=2)
    give_room(again, saved)
    restored(again, saved)
    assert not again.optimizers[0].state
    assert told(again) == told(before)


class Counted(torch.optim.SGD):
    """Only it knows that its keys are numbers."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    known = self.state[weight].setdefault("seen", {0: torch.zeros(3)})
                    known[0] += 1


def counted(model: nn.Module) -> Optimizer:
    return Counted(model.parameters(), lr=0.1)


def test_where_only_it_knows_the_places_it_is_asked_once(tmp_path: Path) -> None:
    before = training(counted, steps=2, unused=True)
    saved = saved_of(before, tmp_path)
    again = training(counted, steps=0, unused=True)
    gradient = torch.ones_like(next(again.model.parameters()))
    next(again.model.parameters()).grad = gradient
    give_room(again, saved)
    assert next(again.model.parameters()).grad is gradient
    restored(again, saved)
    assert told(again) == told(before)
    assert [known["seen"].keys() for known in again.optimizers[0].state.values()] == [{0}] * 4


@pytest.mark.parametrize("broken", [lambda *_, **__: 1 / 0, lambda *_, **__: None])
def test_an_optimizer_that_cannot_tell_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable[..., Any]
) -> None:
    saved = saved_of(training(counted, steps=2), tmp_path)
    again = training(counted, steps=0)
    monkeypatch.setattr(Counted, "step", broken)
    with pytest.raises(ConfigError, match="no telling where Counted would keep"):
        give_room(again, saved)


@pytest.mark.usefixtures("group")
def test_shards_get_back_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sharded(steps: int) -> Training:
        torch.manual_seed(3)
        model = nn.Linear(3, 2)
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        return trained(Training(model, [adam(model)]), steps)

    before = sharded(2)
    saved = saved_of(before, tmp_path)
    again = sharded(0)
    monkeypatch.setattr(torch.optim.Adam, "step", lambda *_, **__: 1 / 0)
    assert len(give_room(again, saved)) == 1
    averages = [known["exp_avg"] for known in again.optimizers[0].state.values()]
    assert all(type(average) is DTensor for average in averages)
    restored(again, saved)
    assert told(again) == told(before)


def test_one_that_cannot_tell_leaves_all_others_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(steps: int) -> Training:
        """One can be given room, and one has to be asked."""
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
        optimizers = [adam(model[0]), counted(model[1])]
        for _ in range(steps):
            model(torch.ones(3)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        return Training(model, optimizers)

    saved = saved_of(two(2), tmp_path)
    again = two(0)
    monkeypatch.setattr(Counted, "step", lambda *_, **__: 1 / 0)
    with pytest.raises(ConfigError, match="no telling where Counted would keep"):
        give_room(again, saved)
    assert [dict(one.state) for one in again.optimizers] == [{}, {}]


def test_who_was_not_saved_knows_what_it_knew(tmp_path: Path) -> None:
    before = training(adam, steps=2)
    saved = saved_of(before._replace(optimizers=()), tmp_path)
    again = training(adam, steps=1)
    known = told(again)
    assert not give_room(again, saved)
    assert told(again) == known


def newer(model: nn.Module) -> Optimizer:
    """As a later torch may have it: with an option more."""
    optimizer = adam(model)
    optimizer.param_groups[0]["exact"] = True
    return optimizer


def test_a_later_torch_s_option_is_no_other_optimizer(tmp_path: Path) -> None:
    before = training(adam, steps=2)
    again = training(newer, steps=0)
    saved = saved_of(before, tmp_path)
    give_room(again, saved)
    state = again.state()
    load_into(state, saved)
    again.adopt(state)
    assert again.optimizers[0].param_groups[0].pop("exact") is True
    assert told(again) == told(before)


def adamax(model: nn.Module) -> Optimizer:
    """All its options are Adam's, too; what it keeps is not."""
    return torch.optim.Adamax(model.parameters())


def test_another_kind_that_has_the_same_options_and_more_is_asked(tmp_path: Path) -> None:
    saved = saved_of(training(adamax, steps=2), tmp_path)
    again = training(adam, steps=1)
    unchanged = told(again)
    with pytest.raises(ConfigError, match=r"Adam would keep .* made no place for all of it"):
        give_room(again, saved)
    assert told(again) == unchanged


def radam(model: nn.Module) -> Optimizer:
    return torch.optim.RAdam(model.parameters())


def nadam(model: nn.Module) -> Optimizer:
    """It has all that RAdam keeps, and keeps more."""
    return torch.optim.NAdam(model.parameters())


def test_what_another_kind_keeps_beside_is_missed(tmp_path: Path) -> None:
    saved = saved_of(training(radam, steps=2), tmp_path)
    again = training(nadam, steps=0)
    give_room(again, saved)
    with pytest.raises(ConfigError, match=r"mu_product, .* was not saved: it was of another kind"):
        load_into(again.state(), saved)
