"""The warden: a hang is looked into once, its stacks are kept, and then it is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from spotfit.agent.hub import Hub
from spotfit.agent.warden import PATIENCE_S, Warden
from spotfit.control.errands import Done, Inline
from spotfit.core.codec import encode
from spotfit.core.errors import StoreError
from spotfit.core.ids import AgentId
from spotfit.ledger import keys
from spotfit.ledger.run import Ledger
from spotfit.model.spec import Vigil
from spotfit.model.wire import Examine, FromWorker, Report, Running, Stacks
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import RUN

ME = AgentId("a-1")
KEY = keys.stacks(ME, 3, 1)


class Late(Inline):
    """Somebody whose answers come when the test lets them."""

    prompt = True

    def run(self, name: str, job: Any) -> Done | None:
        return super().run(name, job) if self.prompt else None


class House:
    """Round 3 of two workers that have begun at 100; nobody may stand still for a minute."""

    def __init__(self, **vigil: Any) -> None:
        self.asked: list[Examine] = []
        self.store, self.errands = MemoryStore(), Late()
        self.hub = Hub(3, 2, name_for=str, now=100.0)
        self.warden = Warden(
            self.hub,
            Vigil(**{"hang_s": 60.0, **vigil}),
            ask=self.asked.append,
            ledger=Ledger(self.store, RUN, ME),
            errands=self.errands,
        )
        for rank in (0, 1):
            self.say(rank, Running(), 100.0)

    def say(self, rank: int, frame: FromWorker, now: float) -> None:
        self.hub.take(rank, msgspec.Raw(encode(frame)), now)

    def tell(self, *ranks: int, number: int = 1) -> None:
        for rank in ranks:
            self.warden.hear(Stacks(3, number, rank, f"stack of {rank}"))


def test_while_all_is_well_nobody_is_asked() -> None:
    house = House()
    assert house.warden.step(159.0) is None
    assert house.asked == []
    assert (house.warden.round, house.warden.next_look()) == (3, 160.0)


def test_a_hang_is_told_once_the_stacks_of_all_are_kept() -> None:
    house = House()
    assert house.warden.step(160.0) is None
    assert house.asked == [Examine(3, 1)]
    house.tell(1)
    assert house.warden.step(161.0) is None
    house.tell(0)
    found = house.warden.step(162.0)
    assert found is not None
    assert found.told.endswith(
        f"; the stacks of all ranks are in {house.store.url}/{KEY}".replace("//.s", "/.s")
    )
    kept = house.store.get(KEY).decode()
    assert kept.startswith("no rank has reported")
    assert "=== rank 0: stack of 0" in kept
    assert "=== rank 1: stack of 1" in kept
    assert house.warden.step(163.0) is None, "told once"
    assert len(house.asked) == 1


def test_those_that_are_waited_for_come_first() -> None:
    house = House()
    house.say(0, Report(0, msgspec.Raw(b"{}")), 110.0)
    house.warden.step(170.0)
    house.tell(0, 1)
    assert house.warden.step(170.0) is not None
    kept = house.store.get(KEY).decode()
    assert kept.index("=== rank 1") < kept.index("=== rank 0")


def test_a_machine_that_does_not_tell_is_not_waited_for_for_ever() -> None:
    house = House()
    house.warden.step(160.0)
    house.tell(0)
    assert house.warden.next_look() == 160.0 + PATIENCE_S
    assert house.warden.step(160.0 + PATIENCE_S) is not None
    assert "=== rank 1: its machine did not tell within 30 s" in house.store.get(KEY).decode()


def test_who_gets_on_again_was_only_slow() -> None:
    house = House()
    house.warden.step(160.0)
    house.say(1, Report(0, msgspec.Raw(b"{}")), 161.0)
    house.tell(0, 1)
    assert house.warden.step(162.0) is None
    assert list(house.store.list()) == []
    house.warden.step(221.0)
    assert house.asked[-1] == Examine(3, 2), "and is looked into anew"
    house.tell(0, 1, number=1)
    assert house.warden.step(222.0) is None, "old answers are no answers"


def test_a_worker_that_does_not_answer_is_found_even_where_nobody_looks_for_slow_ones() -> None:
    house = House(hang_s=0.0)
    assert house.warden.next_look() == float("inf")
    house.warden.unwell(1, 601.0)
    assert house.warden.step(150.0) is None
    house.tell(0, 1)
    found = house.warden.step(151.0)
    assert found is not None
    assert (found.hang.ranks, found.hang.ends_it) == ((1,), True)


def test_one_that_answers_again_is_well() -> None:
    house = House(hang_s=0.0)
    house.warden.unwell(1, 601.0)
    house.warden.step(150.0)
    house.warden.unwell(1, 0.0)
    house.tell(0, 1)
    assert house.warden.step(151.0) is None


def test_another_that_falls_silent_is_looked_into_as_well() -> None:
    house = House(hang_s=0.0)
    house.warden.unwell(1, 601.0)
    house.warden.step(150.0)
    house.tell(0, 1)
    assert house.warden.step(151.0) is not None
    house.warden.unwell(0, 601.0)
    house.warden.step(152.0)
    assert house.asked[-1] == Examine(3, 2)


def test_a_bucket_that_hangs_does_not_keep_a_hang_going() -> None:
    house = House()
    house.warden.step(160.0)
    house.tell(0, 1)
    house.errands.prompt = False
    assert house.warden.step(160.0 + 2 * PATIENCE_S - 0.1) is None
    found = house.warden.step(160.0 + 2 * PATIENCE_S)
    assert found is not None
    assert found.told.endswith("could not be kept: the bucket does not answer")


def test_a_slow_bucket_delays_the_word_and_one_that_refuses_does_not_prevent_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = House()
    house.warden.step(160.0)
    house.tell(0, 1)
    house.errands.prompt = False
    assert house.warden.step(161.0) is None
    house.errands.prompt = True

    def refuse(_key: str, _body: bytes) -> None:
        raise StoreError("it is full")

    monkeypatch.setattr(house.store, "put", refuse)
    found = house.warden.step(162.0)
    assert found is not None
    assert found.told.endswith("; their stacks could not be kept: it is full")
