"""A round's way through the hooks: nobody goes on before all are there and the hook is done."""

from __future__ import annotations

import msgspec

from spotfit.agent.hub import Hub
from spotfit.agent.staging import Staging
from spotfit.core.codec import encode
from spotfit.model.hooks import Ask
from spotfit.model.wire import Call, FromWorker, Outcome, Present, Proceed, Returned
from tests.unit.agent.world import FakeHooks


class Round:
    """Round 3 of two workers."""

    def __init__(self) -> None:
        self.hub = Hub(3, 2, name_for=str)
        self.hooks = FakeHooks()
        self.staging = Staging(self.hub, self.hooks, {"CPU": 1})

    def say(self, frame: FromWorker, *ranks: int) -> None:
        for rank in ranks or (0, 1):
            self.hub.take(rank, msgspec.Raw(encode(frame)), 0.0)

    def to_training(self) -> None:
        self.say(Present("form"))
        self.pass_hook()
        self.say(Present("train"))
        self.pass_hook()

    def pass_hook(self) -> None:
        assert self.staging.step() == []
        self.hooks.left = []
        assert len(self.staging.step()) == 1


def test_workers_proceed_once_all_are_there_and_the_hook_is_performed() -> None:
    one = Round()
    one.say(Present("form"), 0)
    assert (one.staging.step(), one.hooks.ordered) == ([], [])
    one.say(Present("form"), 1)
    assert one.staging.step() == []
    assert one.hooks.ordered == [("on_start", 3, 2)]
    assert one.staging.step() == [], "asked once"
    one.hooks.left = []
    assert one.staging.step() == [(None, Proceed("form"))]
    assert one.staging.step() == []
    assert len(one.hooks.ordered) == 1


def test_the_whole_way_ends_with_the_workers_leave() -> None:
    one = Round()
    one.to_training()
    one.say(Returned(0), 0)
    assert one.staging.step() == []
    one.say(Returned(0), 1)
    assert one.staging.step() == []
    waits = not one.staging.done
    one.hooks.left = []
    assert one.staging.step() == [(None, Proceed("leave"))]
    assert (waits, one.staging.done) == (True, True)
    hooks = [hook for hook, _, _ in one.hooks.ordered]
    assert hooks == ["on_start", "on_training_start", "on_shutdown"]
    one.staging.close()
    assert len(one.hooks.ordered) == 3, "it was shut down already"


def test_calls_go_to_those_they_are_for_and_outcomes_come_back() -> None:
    one = Round()
    one.hooks.wants = [
        Ask(3, 1, (0, 1), b"all"),
        Ask(3, 2, (1,), b"one"),
        Ask(2, 3, (0,), b"of a round that is over"),
    ]
    assert one.staging.step() == [(None, Call(1, b"all")), (1, Call(2, b"one"))]
    one.say(Outcome(2, b"value"), 1)
    assert one.staging.step() == []
    assert one.hooks.answers == [(3, 1, Outcome(2, b"value"))]


def test_a_round_that_is_lost_shuts_down_what_was_started() -> None:
    one = Round()
    one.to_training()
    one.staging.lose_workers()
    assert one.hooks.lost == [3]
    one.staging.close()
    assert one.hooks.ordered[-1] == ("on_shutdown", 3, 2)


def test_what_was_never_started_is_not_shut_down() -> None:
    one = Round()
    one.say(Present("form"))
    one.staging.step()
    one.staging.close()
    assert [hook for hook, _, _ in one.hooks.ordered] == ["on_start"]
    assert one.hooks.lost == [3]
