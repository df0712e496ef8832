"""The process of the hooks as the leader sees it: ordered in turn, and ended where it hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from spotfit.agent.hooks import PATIENCE_S, LiveHooks
from spotfit.core.codec import encode
from spotfit.model.audience import Hello
from spotfit.model.hooks import Ask, FromHooks, Performed
from spotfit.model.watch import Trouble
from spotfit.model.wire import Outcome
from spotfit.testing.builders import RUN


class Ear:
    """A process that does what the test says."""

    def __init__(self, answer: Callable[[list[bytes]], None], end: Callable[[str, bool], None]):
        self.told: list[dict[str, Any]] = []
        self.killed = False
        self.answer, self.end = answer, end

    def send(self, body: bytes) -> None:
        self.told.append(msgspec.json.decode(body))

    def kill(self) -> None:
        self.killed = True
        self.end("was killed by SIGKILL", False)

    def says(self, *frames: FromHooks) -> None:
        self.answer([encode(frame) for frame in frames])

    @property
    def words(self) -> list[str]:
        return [frame.get("hook", frame["type"]) for frame in self.told]


class House:
    def __init__(self) -> None:
        self.ears: list[Ear] = []
        self.moments: list[tuple[float, Callable[[], None]]] = []
        self.hooks = LiveHooks(Hello("memory://x", {}, "secret", RUN), self.begin, self.later)

    def begin(self, answer: Callable[[list[bytes]], None], end: Callable[[str, bool], None]) -> Ear:
        self.ears.append(Ear(answer, end))
        return self.ears[-1]

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.moments.append((seconds, call))

    def time_passes(self) -> None:
        moments, self.moments = self.moments, []
        for _, call in moments:
            call()

    def start(self, round_number: int) -> None:
        self.hooks.perform("on_start", round_number, 2, {"CPU": 1})


def test_nobody_is_started_before_there_is_something_to_perform() -> None:
    house = House()
    house.hooks.over(1)
    house.hooks.close()
    assert house.hooks.caught_up
    assert house.ears == []


def test_a_hook_is_performed_once_it_says_so() -> None:
    house = House()
    house.start(1)
    house.hooks.perform("on_training_start", 1, 2, {})
    assert house.ears[0].words == ["hello", "on_start", "on_training_start"]
    assert house.ears[0].told[1]["resources"] == {"CPU": 1}
    house.ears[0].says(Performed("on_start", 1))
    assert house.hooks.performed("on_start", 1)
    assert not house.hooks.performed("on_training_start", 1)
    assert not house.hooks.caught_up
    house.ears[0].says(Performed("on_training_start", 1))
    assert house.hooks.caught_up


def test_its_calls_are_handed_on_once_and_answers_back() -> None:
    house = House()
    house.start(1)
    ask = Ask(1, 7, (0, 1), b"call")
    house.ears[0].says(ask)
    assert house.hooks.asks() == [ask]
    assert house.hooks.asks() == []
    house.hooks.answered(1, 0, Outcome(7, b"value", "Traceback"))
    assert house.ears[0].told[-1] == {
        "type": "told",
        "round": 1,
        "rank": 0,
        "call": 7,
        "value": "dmFsdWU=",
        "raised": "Traceback",
    }


def test_the_first_trouble_stays() -> None:
    house = House()
    house.start(1)
    house.ears[0].says(Performed("on_start", 1, "Traceback: first", "f/1"))
    house.ears[0].says(Performed("on_shutdown", 1, "Traceback: second"))
    trouble = Trouble("the backend's on_start raised", "Traceback: first", "f/1")
    assert house.hooks.trouble() == trouble
    assert house.hooks.caught_up


def test_a_process_that_dies_is_trouble_and_one_we_end_is_none() -> None:
    house = House()
    house.start(1)
    house.hooks.close()
    assert house.ears[0].killed
    assert house.hooks.trouble() is None
    house.start(2)
    house.ears[1].end("exited with code 3", False)
    trouble = house.hooks.trouble()
    assert trouble is not None
    assert trouble.told == "The process of the hooks exited with code 3."


def test_a_hook_that_hangs_does_not_keep_the_next_attempt_waiting() -> None:
    house = House()
    house.start(1)
    house.hooks.over(1)
    house.hooks.perform("on_shutdown", 1, 2, {})
    house.start(2)
    assert [seconds for seconds, _ in house.moments] == [PATIENCE_S]
    house.time_passes()
    first, second = house.ears
    assert first.killed
    assert second.words == ["hello", "on_start"]
    assert second.told[1]["round"] == 2
    assert house.hooks.trouble() is None
    assert house.hooks.performed("on_shutdown", 1), "nobody waits for it"


def test_one_that_came_back_in_time_is_left_alone() -> None:
    house = House()
    house.start(1)
    house.hooks.over(1)
    house.start(2)
    house.ears[0].says(Performed("on_start", 1))
    house.time_passes()
    assert len(house.ears) == 1
    assert not house.ears[0].killed
