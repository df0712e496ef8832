"""The process of a backend's hooks: each gets its workers, and what it raises is judged."""

from __future__ import annotations

import os
from typing import Any

import pytest

from spotfit.core.errors import WorkersGoneError
from spotfit.frameworks.config import Backend, BackendConfig
from spotfit.model.hooks import Ask, Hook, Over, Perform, Performed, Told
from spotfit.ship.sign import RunKey
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import RUN
from spotfit.worker.hooks import Stage
from spotfit.worker.worker_group import WorkerGroup


class Player(Backend):
    """Does what the test says."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, Any]] = []
        self.act: Any = lambda _group: None

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        self.play("on_start", worker_group, backend_config)

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        self.play("on_training_start", worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        self.play("on_shutdown", worker_group, backend_config)

    def play(self, hook: str, group: WorkerGroup, config: Any) -> None:
        self.seen.append((hook, len(group), config))
        self.act(group)


class Piece(BackendConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return Player


CONFIG = Piece()


@pytest.fixture
def player() -> Any:
    player: Any = Player()
    player.__init__()
    return player


class House:
    """A stage, and what it says."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.stage = Stage(self.said.append, MemoryStore(), RunKey(b"k" * 32, RUN))
        self.loads = 0

    def load(self) -> Any:
        self.loads += 1
        return CONFIG

    def perform(self, hook: Hook, round_number: int = 1, world_size: int = 2) -> Performed:
        order = Perform(hook, round_number, world_size, {"CPU": 1})
        return self.stage.perform(order, self.load)


def test_every_hook_gets_the_workers_and_one_config(player: Any) -> None:
    house = House()
    for hook in ("on_start", "on_training_start", "on_shutdown"):
        assert house.perform(hook) == Performed(hook, 1)
    assert [hook for hook, _, _ in player.seen] == ["on_start", "on_training_start", "on_shutdown"]
    assert all((size, config) == (2, CONFIG) for _, size, config in player.seen)
    assert house.loads == 1


def test_what_a_hook_raises_is_told_and_kept(player: Any) -> None:
    player.act = lambda _group: os.environ["NO_SUCH"]
    performed = House().perform("on_start")
    assert performed.trouble is not None
    assert "KeyError: 'NO_SUCH'" in performed.trouble
    assert performed.pickle_key is not None


def test_a_hook_that_exits_is_trouble_and_not_the_end_of_the_process(player: Any) -> None:
    player.act = lambda _group: exit(3)
    assert "SystemExit: 3" in (House().perform("on_start").trouble or "")


def test_what_cannot_be_loaded_is_trouble(player: Any) -> None:
    def load() -> Any:
        raise ImportError("no module")

    performed = House().stage.perform(Perform("on_start", 1, 2), load)
    assert "ImportError: no module" in (performed.trouble or "")


def test_answers_reach_the_hook_that_waits_for_them(player: Any) -> None:
    house = House()

    def call(group: WorkerGroup) -> None:
        future = group.execute_single_async(0, len, "abc")
        ask = house.said[-1]
        assert isinstance(ask, Ask)
        house.stage.hear(Told(ask.round, 0, ask.call, b"", "Traceback\nValueError: no"))
        future.result(5)

    player.act = call
    assert "ValueError: no" in (house.perform("on_start").trouble or "")


# --- workers that are gone -----------------------------------------------------------------------


def call(group: WorkerGroup) -> None:
    group.execute(len, "abc")


def call_in_other_words(group: WorkerGroup) -> None:
    try:
        call(group)
    except WorkersGoneError as gone:
        raise RuntimeError("could not say goodbye") from gone


def stumble(_group: WorkerGroup) -> None:
    raise ArithmeticError("lost count")


@pytest.mark.parametrize(
    ("hook", "act", "troubles"),
    [
        ("on_start", call, False),
        ("on_start", stumble, False),
        ("on_training_start", stumble, False),
        ("on_shutdown", call, False),
        ("on_shutdown", call_in_other_words, False),
        ("on_shutdown", stumble, True),
    ],
)
def test_what_comes_of_workers_that_are_gone_is_no_trouble(
    player: Any, hook: Hook, act: Any, troubles: bool
) -> None:
    """A start whose attempt is lost has failed for that; a shutdown may miss its workers, but not
    make mistakes of its own."""
    house = House()
    house.stage.hear(Over(1))
    player.act = act
    assert (house.perform(hook).trouble is not None) == troubles
    assert house.said == [], "nobody was called"


def test_another_attempt_has_workers_again(player: Any) -> None:
    house = House()
    house.stage.hear(Over(1))
    player.act = lambda group: group.execute_async(len, "abc")
    assert house.perform("on_start", round_number=2).trouble is None
    assert [ask.round for ask in house.said] == [2]
