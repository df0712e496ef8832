"""EC2's word that an instance goes: behind a token, two minutes ahead, and never a false one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spotfit.agent.notices.aws import Ec2Metadata
from spotfit.host import clocks
from spotfit.model.world import Advice, Notice
from spotfit_localsim.wire.http import Reply, Request, Server


class Instance:
    """A metadata service, version 2."""

    def __init__(self) -> None:
        self.action: bytes | None = None
        self.rebalance = False
        self.token = "1"
        self.tokens_given = 0

    def answer(self, request: Request) -> Reply:
        if request.path == "/latest/api/token":
            self.tokens_given += 1
            return Reply(200, self.token.encode())
        if request.headers.get("x-aws-ec2-metadata-token") != self.token:
            return Reply(401)
        if request.path.endswith("/spot/instance-action") and self.action:
            return Reply(200, self.action)
        if request.path.endswith("/rebalance") and self.rebalance:
            return Reply(200, b"{}")
        return Reply(404)


@pytest.fixture
def instance() -> Instance:
    return Instance()


@pytest.fixture
def metadata(instance: Instance) -> Iterator[Ec2Metadata]:
    server = Server(instance.answer)
    yield Ec2Metadata(server.url)
    server.close()


def test_nothing_is_said_until_the_instance_goes(metadata: Ec2Metadata, instance: Instance) -> None:
    assert metadata.look() is None
    instance.action = b'{"action": "terminate", "time": "2099-09-18T08:22:00Z"}'
    notice = metadata.look()
    assert isinstance(notice, Notice)
    assert notice.reason == "EC2 will terminate it"
    assert notice.deadline_ms == 4_093_402_920_000
    assert notice.seconds_left == pytest.approx(
        (notice.deadline_ms - clocks.wall_ms()) / 1000, abs=5
    )


def test_a_time_that_is_over_leaves_nothing(metadata: Ec2Metadata, instance: Instance) -> None:
    instance.action = b'{"action": "stop", "time": "2017-09-18T08:22:00Z"}'
    notice = metadata.look()
    assert isinstance(notice, Notice)
    assert notice.seconds_left == 0.0


def test_a_token_is_asked_for_once_and_again_when_it_is_refused(
    metadata: Ec2Metadata, instance: Instance
) -> None:
    for _ in range(3):
        metadata.look()
    assert instance.tokens_given == 1
    instance.token = "2"
    metadata.look()
    assert instance.tokens_given == 2


def test_a_recommendation_to_rebalance_is_advice_until_the_notice_comes(
    metadata: Ec2Metadata, instance: Instance
) -> None:
    """Most instances it is told of are never taken away."""
    instance.rebalance = True
    first, again = metadata.look(), metadata.look()
    assert isinstance(first, Advice)
    assert again == first
    instance.action = b'{"action": "terminate", "time": "2099-09-18T08:22:00Z"}'
    assert isinstance(metadata.look(), Notice)
