"""A source that polls in a thread: it does not block its agent, and its errors are logged."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from spotfit.agent.notices.polled import PolledNoticeSource, http_request, request_metadata
from spotfit.model.topology import Notice, PreemptionRisk
from spotfit_localsim.clouds.http_server import WireRequest, WireResponse, WireServer

pytestmark = pytest.mark.real_time("the thread of a source waits in real time")


def test_a_notice_wakes_the_agent_and_is_final() -> None:
    woken = threading.Event()
    answers: Iterator[Notice | None] = iter([None, None, Notice(reason="preempted")])
    source = PolledNoticeSource(woken.set, lambda: next(answers), interval_s=0.001, name="test")
    assert woken.wait(20)
    assert source.poll(0.0) == source.poll(1.0) == Notice(reason="preempted")


def test_a_risk_is_returned_until_a_notice_arrives() -> None:
    woken, has_notice = threading.Event(), threading.Event()

    def check() -> Notice | PreemptionRisk:
        return (
            Notice(reason="preempted") if has_notice.is_set() else PreemptionRisk(reason="at risk")
        )

    source = PolledNoticeSource(woken.set, check, interval_s=0.001, name="test")
    assert woken.wait(20)
    assert source.poll(0.0) == PreemptionRisk(reason="at risk")
    woken.clear()
    has_notice.set()
    assert woken.wait(20)
    assert source.poll(1.0) == Notice(reason="preempted")


def test_a_failing_check_is_logged_once_and_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    woken, check_count = threading.Event(), 0

    def check() -> Notice | None:
        nonlocal check_count
        check_count += 1
        if check_count < 5:
            raise OSError("no route")
        return Notice(reason="preempted")

    PolledNoticeSource(woken.set, check, interval_s=0.001, name="test")
    assert woken.wait(20)
    assert capsys.readouterr().err.count("no route") == 1


def test_a_request_sends_headers_below_the_base_path() -> None:
    requests: list[WireRequest] = []

    def respond(request: WireRequest) -> WireResponse:
        requests.append(request)
        return WireResponse(201, b"yes")

    server = WireServer(respond)
    assert request_metadata(f"{server.url}/base/", "/x", method="PUT", headers={"K": "v"}) == (
        201,
        b"yes",
    )
    server.close()
    assert (requests[0].method, requests[0].path, requests[0].headers["k"]) == (
        "PUT",
        "/base/x",
        "v",
    )


def test_response_headers_are_in_lower_case() -> None:
    server = WireServer(lambda _: WireResponse(200, b"yes", {"ETag": "7"}))
    response = http_request(server.url, "/")
    server.close()
    assert (response.status, response.body, response.headers["etag"]) == (200, b"yes", "7")


def test_the_timeout_can_be_extended() -> None:
    server = WireServer(lambda _: WireResponse(200, b"held", hold_s=0.3))
    try:
        assert request_metadata(server.url, "/", timeout_s=20.0) == (200, b"held")
        with pytest.raises(TimeoutError):
            request_metadata(server.url, "/", timeout_s=0.05)
    finally:
        server.close()
