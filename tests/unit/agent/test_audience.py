"""The callbacks' process as the leader sees it: told in order, heard later, trouble kept."""

from collections.abc import Callable

import msgspec

from spotfit.agent.audience import LiveAudience
from spotfit.core.codec import encode
from spotfit.model.audience import Heard, Hello
from spotfit.model.watch import Trouble
from spotfit.testing.builders import RUN


class Ear:
    """A process that hears when the test says so."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.killed = False
        self.answer: Callable[[list[bytes]], None]
        self.end: Callable[[str, bool], None]

    def begin(
        self, answer: Callable[[list[bytes]], None], end: Callable[[str, bool], None]
    ) -> "Ear":
        self.answer, self.end = answer, end
        return self

    def send(self, body: bytes) -> None:
        self.told.append(msgspec.json.decode(body)["type"])

    def kill(self) -> None:
        self.killed = True

    def hears(self, trouble: str | None = None, pickle_key: str | None = None) -> None:
        self.answer([encode(Heard(trouble, pickle_key))])


def an_audience() -> tuple[LiveAudience, Ear]:
    ear = Ear()
    return LiveAudience(Hello("memory://x", {}, "secret", RUN), ear.begin), ear


def test_nobody_is_started_before_there_is_something_to_tell() -> None:
    audience, ear = an_audience()
    assert audience.caught_up
    assert ear.told == []
    audience.close()
    assert not ear.killed


def test_it_has_caught_up_once_all_is_heard() -> None:
    audience, ear = an_audience()
    audience.reported([msgspec.Raw(b'{"loss":1}')], "c1")
    audience.failed({}, {1: "it broke"})
    assert ear.told == ["hello", "reported", "failed"]
    ear.hears()
    once = audience.caught_up
    ear.hears()
    assert (once, audience.caught_up) == (False, True)
    assert audience.trouble() is None


def test_the_first_trouble_stays_and_nothing_more_is_waited_for() -> None:
    audience, ear = an_audience()
    for _ in range(3):
        audience.reported([], None)
    ear.hears("Traceback: first", "f/1")
    ear.hears("Traceback: second")
    assert audience.trouble() == Trouble("a callback raised", "Traceback: first", "f/1")
    assert audience.caught_up


def test_a_process_that_dies_is_trouble() -> None:
    audience, ear = an_audience()
    audience.reported([], None)
    ear.end("was killed by SIGKILL", False)
    trouble = audience.trouble()
    assert trouble is not None
    assert trouble.told == "The process of the callbacks was killed by SIGKILL."
