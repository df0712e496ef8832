"""EC2's own word that this spot instance will be taken away: the instance metadata service, v2.

It comes two minutes before, at best. Nobody sends a SIGTERM: AWS Batch's containers are not
drained. https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from spotfit.agent.notices.polled import PolledNotice, ask
from spotfit.core.codec import decoder
from spotfit.host import clocks, env
from spotfit.model.world import Advice, Notice

ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
DISABLED = "AWS_EC2_METADATA_DISABLED"
_ENDPOINT = "http://169.254.169.254"
_EVERY_S = 1.0
_TOKEN_FOR_S = 21_600
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_ADVICE = Advice("EC2 recommends to rebalance: it sees a higher risk for this instance")
"""https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html"""


class Action(msgspec.Struct, frozen=True):
    """What the service says, once there is something to say."""

    action: str
    time: datetime


_action = decoder(Action)


class Ec2Metadata:
    """The service of this instance; its token is renewed when it is refused."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._token = ""
        self._warned = False

    def look(self) -> Notice | Advice | None:
        """The notice, if there is one; else the advice, if that was given."""
        status, body = self._get(_ACTION)
        if status != 200:
            return self._advice()
        told = _action.decode(body)
        deadline_ms = int(told.time.astimezone(UTC).timestamp() * 1000)
        left_s = max(0.0, (deadline_ms - clocks.wall_ms()) / 1000)
        return Notice(f"EC2 will {told.action} it", left_s, deadline_ms)

    def _advice(self) -> Advice | None:
        """Once given it holds, and is not asked for again."""
        self._warned = self._warned or self._get(_REBALANCE)[0] == 200
        return _ADVICE if self._warned else None

    def _get(self, path: str) -> tuple[int, bytes]:
        status, body = self._asked(path)
        if status == 401:
            self._renew()
            status, body = self._asked(path)
        return status, body

    def _asked(self, path: str) -> tuple[int, bytes]:
        return ask(self._url, path, headers={"X-aws-ec2-metadata-token": self._token})

    def _renew(self) -> None:
        lasting = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_FOR_S)}
        status, body = ask(self._url, "/latest/api/token", method="PUT", headers=lasting)
        if status == 200:
            self._token = body.decode()


class AwsNotice(PolledNotice):
    """Asks once a second, by AWS's advice at least every five."""

    def __init__(self, wake: Callable[[], None], every_s: float = _EVERY_S) -> None:
        look = Ec2Metadata(env.lookup(ENDPOINT) or _ENDPOINT).look
        disabled = (env.lookup(DISABLED) or "").lower() == "true"
        super().__init__(wake, _nothing if disabled else look, every_s=every_s, name="aws")


def _nothing() -> None:
    return None
