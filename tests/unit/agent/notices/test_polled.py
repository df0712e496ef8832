"""A source that asks in a thread: it never stands in the way, and never ends its agent."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from spotfit.agent.notices.polled import PolledNotice, ask, whole_answer
from spotfit.model.world import Advice, Notice
from spotfit_localsim.wire.http import Reply, Request, Server

pytestmark = pytest.mark.real_time("the thread of a source waits in real time")


def test_what_is_seen_wakes_the_agent_and_stays() -> None:
    woken = threading.Event()
    answers: Iterator[Notice | None] = iter([None, None, Notice("going")])
    source = PolledNotice(woken.set, lambda: next(answers), every_s=0.001, name="test")
    assert woken.wait(20)
    assert source.poll(0.0) == source.poll(1.0) == Notice("going")


def test_what_is_less_than_a_notice_stays_until_one_comes() -> None:
    woken, going = threading.Event(), threading.Event()

    def look() -> Notice | Advice:
        return Notice("going") if going.is_set() else Advice("in danger")

    source = PolledNotice(woken.set, look, every_s=0.001, name="test")
    assert woken.wait(20)
    assert source.poll(0.0) == Advice("in danger")
    woken.clear()
    going.set()
    assert woken.wait(20)
    assert source.poll(1.0) == Notice("going")


def test_what_fails_is_told_once_and_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    woken, asked = threading.Event(), 0

    def look() -> Notice | None:
        nonlocal asked
        asked += 1
        if asked < 5:
            raise OSError("no route")
        return Notice("going")

    PolledNotice(woken.set, look, every_s=0.001, name="test")
    assert woken.wait(20)
    assert capsys.readouterr().err.count("no route") == 1


def test_a_question_carries_its_headers_below_the_service_s_own_path() -> None:
    heard: list[Request] = []

    def answer(request: Request) -> Reply:
        heard.append(request)
        return Reply(201, b"yes")

    server = Server(answer)
    assert ask(f"{server.url}/base/", "/x", method="PUT", headers={"K": "v"}) == (201, b"yes")
    server.close()
    assert (heard[0].method, heard[0].path, heard[0].headers["k"]) == ("PUT", "/base/x", "v")


def test_who_needs_the_headers_of_an_answer_gets_them_in_lower_case() -> None:
    server = Server(lambda _: Reply(200, b"yes", {"ETag": "7"}))
    told = whole_answer(server.url, "/")
    server.close()
    assert (told.status, told.body, told.headers["etag"]) == (200, b"yes", "7")


def test_who_expects_a_late_answer_may_wait_for_it_longer() -> None:
    server = Server(lambda _: Reply(200, b"at last", hold_s=0.3))
    try:
        assert ask(server.url, "/", within_s=20.0) == (200, b"at last")
        with pytest.raises(TimeoutError):
            ask(server.url, "/", within_s=0.05)
    finally:
        server.close()
