"""Tests of the EC2 notice source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spotfit.agent.notices.aws import Ec2Metadata
from spotfit.host import system
from spotfit.model.topology import Notice, PreemptionRisk
from spotfit_localsim.clouds.http_server import WireRequest, WireResponse, WireServer


class Instance:
    """A metadata service, version 2."""

    def __init__(self) -> None:
        self.action: bytes | None = None
        self.rebalance = False
        self.token = "1"
        self.issued_tokens = 0

    def answer(self, request: WireRequest) -> WireResponse:
        if request.path == "/latest/api/token":
            self.issued_tokens += 1
            return WireResponse(200, self.token.encode())
        if request.headers.get("x-aws-ec2-metadata-token") != self.token:
            return WireResponse(401)
        if request.path.endswith("/spot/instance-action") and self.action:
            return WireResponse(200, self.action)
        if request.path.endswith("/rebalance") and self.rebalance:
            return WireResponse(200, b"{}")
        return WireResponse(404)


@pytest.fixture
def instance() -> Instance:
    return Instance()


@pytest.fixture
def metadata(instance: Instance) -> Iterator[Ec2Metadata]:
    server = WireServer(instance.answer)
    yield Ec2Metadata(server.url)
    server.close()


def test_no_notice_before_the_interruption(metadata: Ec2Metadata, instance: Instance) -> None:
    assert metadata.check() is None
    instance.action = b'{"action": "terminate", "time": "2099-09-18T08:22:00Z"}'
    notice = metadata.check()
    assert isinstance(notice, Notice)
    assert notice.reason == "EC2 will terminate the instance"
    assert notice.deadline_ms == 4_093_402_920_000
    assert notice.seconds_left == pytest.approx(
        (notice.deadline_ms - system.wall_ms()) / 1000, abs=5
    )


def test_a_past_deadline_leaves_0_seconds(metadata: Ec2Metadata, instance: Instance) -> None:
    instance.action = b'{"action": "stop", "time": "2017-09-18T08:22:00Z"}'
    notice = metadata.check()
    assert isinstance(notice, Notice)
    assert notice.seconds_left == 0.0


def test_a_rejected_token_is_renewed(metadata: Ec2Metadata, instance: Instance) -> None:
    for _ in range(3):
        metadata.check()
    assert instance.issued_tokens == 1
    instance.token = "2"
    metadata.check()
    assert instance.issued_tokens == 2


def test_a_rebalance_recommendation_is_a_risk_until_the_notice(
    metadata: Ec2Metadata, instance: Instance
) -> None:
    """Most instances with a recommendation are never interrupted."""
    instance.rebalance = True
    first, again = metadata.check(), metadata.check()
    assert isinstance(first, PreemptionRisk)
    assert again == first
    instance.action = b'{"action": "terminate", "time": "2099-09-18T08:22:00Z"}'
    assert isinstance(metadata.check(), Notice)
