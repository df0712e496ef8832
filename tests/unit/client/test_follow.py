"""Following: every line of every worker once, with its rank, whatever the store does."""

from __future__ import annotations

import pytest

from spotfit.client.follow import Console, Output, Reminder
from spotfit.core.codec import encode
from spotfit.core.errors import TransientStoreError
from spotfit.core.ids import Token
from spotfit.ledger import keys
from spotfit.model.events import (
    FitEnded,
    NodeLost,
    Released,
    RoundOpened,
    ValidationAsked,
    ValidationBegun,
)
from spotfit.model.output import VALIDATION
from spotfit.model.view import View
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import TOKEN, a_commit, a_round, a_spec, a_view, an_agent, an_entry

A, B = an_agent(0), an_agent(1)


class Moody(MemoryStore):
    """Cannot be read when `fails_at` is asked for."""

    fails_at = ""

    def get(self, key: str) -> bytes:
        if key == self.fails_at:
            raise TransientStoreError("no answer")
        return super().get(key)


class Asked(MemoryStore):
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def get(self, key: str) -> bytes:
        self.asked.append(key)
        return super().get(key)


def lines(*texts: str, rank: int = 0) -> bytes:
    return b"".join(encode({"rank": rank, "text": text}) + b"\n" for text in texts)


END = encode({"end": True}) + b"\n"


def texts(output: Output) -> list[str]:
    return [line["text"] for line in output.new_lines()]


def test_it_goes_on_where_it_stopped() -> None:
    store = MemoryStore()
    output = Output(store)
    output.watch(A)
    assert texts(output) == []
    store.put(keys.logs(A, 0), lines("one", "two"))
    store.put(keys.logs(A, 1), lines("three"))
    assert texts(output) == ["one", "two", "three"]
    store.put(keys.logs(A, 2), lines("four"))
    assert texts(output) == ["four"]


def test_to_be_told_of_an_agent_twice_is_to_be_told_once() -> None:
    store = MemoryStore()
    output = Output(store)
    store.put(keys.logs(A, 0), lines("one"))
    output.watch(A)
    assert texts(output) == ["one"]
    output.watch(A)
    assert texts(output) == []


def test_only_agents_of_interest_are_read() -> None:
    store = MemoryStore()
    store.put(keys.logs(B, 0), lines("hidden"))
    output = Output(store)
    output.watch(A)
    assert texts(output) == []


def test_it_is_complete_when_every_agent_has_written_its_last_line() -> None:
    store = MemoryStore()
    output = Output(store)
    completed = [output.complete]
    output.watch(A)
    output.watch(B)
    store.put(keys.logs(A, 0), lines("bye") + END)
    assert texts(output) == ["bye"]
    completed.append(output.complete)
    store.put(keys.logs(B, 0), END)
    assert texts(output) == []
    completed.append(output.complete)
    assert completed == [True, False, True], "of nobody nothing is missing"


def test_the_dead_are_asked_for_their_last_words_but_not_for_ever() -> None:
    store = Asked()
    output = Output(store)
    output.watch(A)
    output.watch(B)
    output.lose(A)
    store.put(keys.logs(A, 0), lines("last words"))
    assert texts(output) == ["last words"]
    for _ in range(20):
        assert texts(output) == []
    assert store.asked.count(keys.logs(A, 1)) == 10
    assert store.asked.count(keys.logs(B, 0)) == 21, "the living may still speak"
    assert not output.complete
    output.lose(B)
    for _ in range(10):
        assert texts(output) == []
    assert output.complete


def test_nobody_waits_for_a_machine_that_was_lost() -> None:
    console = Console(MemoryStore(), write=list[str]().append)
    console.learn(0, b"", an_entry(RoundOpened(a_round())))
    for node, agent in enumerate((A, B)):
        console.learn(1, b"", an_entry(NodeLost(TOKEN, node, agent, "reclaimed")))
    console.learn(2, b"", an_entry(NodeLost(TOKEN, 2, None, "it never joined")))
    assert not console.complete
    for _ in range(10):
        console.show_new()
    assert console.complete


def test_a_store_that_fails_on_the_way_loses_no_line() -> None:
    store, written = Moody(), list[str]()
    console = Console(store, write=written.append)
    console.learn(0, b"", an_entry(RoundOpened(a_round())))
    store.put(keys.logs(A, 0), lines("one"))
    store.put(keys.logs(A, 1), lines("two"))
    store.fails_at = keys.logs(A, 1)
    console.show_new()
    store.fails_at = ""
    console.show_new()
    assert written == ["(rank 0) one\n", "(rank 0) two\n"]


def test_lines_of_nobodys_rank_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    store = MemoryStore()
    console = Console(store)
    console.watch(a_round())
    store.put(keys.logs(A, 0), lines("a callback", rank=-1) + lines("rank 1 hangs", rank=-2) + END)
    console.show_new()
    assert capsys.readouterr().out == "(beside) a callback\n(run) rank 1 hangs\n"


def test_a_run_that_waits_says_so_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(MemoryStore())
    waiting = a_view(spec=a_spec(workers_min=3, workers_max=4), last_refusal="no capacity")
    for now in (0.0, 29.9):
        console.remind(waiting, now)
    assert capsys.readouterr().err == ""
    console.remind(waiting, 30.0)
    console.remind(waiting, 59.9)
    [line] = capsys.readouterr().err.splitlines()
    assert "machines for 2 of at least 3 workers are there or to come" in line
    assert "the last answer was: no capacity" in line
    console.remind(waiting, 60.0)
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "busy", [a_view(round=a_round()), a_view(ended=FitEnded("finished")), View()]
)
def test_a_run_that_is_at_work_or_over_waits_for_nothing(busy: View) -> None:
    reminder = Reminder()
    assert reminder.look(a_view(), 0.0) is None
    assert reminder.look(busy, 29.0) is None
    assert reminder.look(a_view(), 31.0) is None, "it has just begun to wait"
    assert reminder.look(a_view(), 61.0) is not None


def test_a_run_that_only_validates_says_how_much_is_left() -> None:
    left = (a_commit("c1", validation=ValidationAsked()),)
    waiting = a_view(training_ended=FitEnded("finished"), unvalidated=left)
    reminder = Reminder()
    reminder.look(waiting, 0.0)
    assert reminder.look(waiting, 30.0) == "1 checkpoints are still to be validated"


def test_the_console_follows_who_validates_until_its_machine_is_let_go() -> None:
    store, written = MemoryStore(), list[str]()
    console = Console(store, write=written.append)
    store.put(keys.logs(A, 0), lines("looking", rank=VALIDATION))
    console.learn(3, b"", an_entry(ValidationBegun("c1", "1-0", 1, A, Token("t-v"), 0)))
    console.show_new()
    assert written == ["(validation) looking\n"]
    assert not console.complete
    console.learn(4, b"", an_entry(Released(Token("t-1"), (Token("t-v"),))))
    for _ in range(20):
        console.show_new()
    assert console.complete, "nobody waits for its last words for ever"


def test_the_console_follows_whoever_has_a_place(capsys: pytest.CaptureFixture[str]) -> None:
    store = MemoryStore()
    console = Console(store)
    store.put(keys.logs(B, 0), lines("hello", rank=1) + END)
    store.put(keys.logs(A, 0), END)
    console.show_new()
    assert capsys.readouterr().out == ""
    console.learn(3, b"", an_entry(RoundOpened(a_round(), "2 workers on 2 machines")))
    console.show_new()
    out, err = capsys.readouterr()
    assert out == "(rank 1) hello\n"
    assert "round 1: 2 workers on 2 machines" in err
    assert console.complete
