"""Following: every line of every worker once, with its rank, whatever the store does."""

from __future__ import annotations

import pytest

from spotfit.client.follow import Console, Output
from spotfit.core.codec import encode
from spotfit.core.errors import TransientStoreError
from spotfit.ledger import keys
from spotfit.model.events import NodeLost, RoundOpened
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import TOKEN, a_round, an_agent, an_entry

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
