"""Spot interruption notices of EC2, from the instance metadata service (IMDSv2).

A notice arrives at most two minutes before the interruption. AWS Batch does not drain containers:
they receive no SIGTERM. https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from spotfit.agent.notices.polled import PolledNoticeSource, request_metadata
from spotfit.core.codec import decoder
from spotfit.host import env, system
from spotfit.model.topology import Notice, PreemptionRisk

ENDPOINT_ENV = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
DISABLED_ENV = "AWS_EC2_METADATA_DISABLED"
_DEFAULT_ENDPOINT = "http://169.254.169.254"
# AWS recommends to poll at least every 5 s; each second counts within two minutes.
_POLL_INTERVAL_S = 1.0
# Six hours, the longest lifetime that the service allows.
_TOKEN_TTL_S = 21_600
_ACTION_PATH = "/latest/meta-data/spot/instance-action"
_REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html
_REBALANCE_ADVICE = PreemptionRisk(
    reason="EC2 sent a rebalance recommendation: this instance has an elevated interruption risk"
)


class SpotInstanceAction(msgspec.Struct, frozen=True):
    """The `spot/instance-action` document; the service answers 404 before a notice."""

    action: str
    time: datetime


_action_decoder = decoder(SpotInstanceAction)


class Ec2Metadata:
    """Client of the metadata service, for the thread of `AwsNoticeSource`.

    The session token is renewed when it is rejected.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        # Empty until the first 401: hosts that still allow IMDSv1 need no token.
        self._token = ""
        self._is_rebalance_recommended = False

    def check(self) -> Notice | PreemptionRisk | None:
        """Return the interruption notice, else the rebalance recommendation as a risk, else None.

        Blocks for the requests; a status other than 200 counts as None. Raises `OSError`,
        `http.client.HTTPException` or `msgspec.DecodeError` if a request fails or its answer is
        invalid.
        """
        status, body = self._get(_ACTION_PATH)
        if status != 200:
            # EC2 never withdraws a recommendation: one request less per second once it was sent.
            if not self._is_rebalance_recommended:
                self._is_rebalance_recommended = self._get(_REBALANCE_PATH)[0] == 200
            return _REBALANCE_ADVICE if self._is_rebalance_recommended else None
        notice = _action_decoder.decode(body)
        deadline_ms = int(notice.time.astimezone(UTC).timestamp() * 1000)
        # Converted with the clock that AWS synchronizes: elsewhere only durations are compared.
        left_s = max(0.0, (deadline_ms - system.wall_ms()) / 1000)
        return Notice(
            reason=f"EC2 will {notice.action} the instance",
            seconds_left=left_s,
            deadline_ms=deadline_ms,
        )

    def _get(self, path: str) -> tuple[int, bytes]:
        status, body = self._request(path)
        if status == 401:  # the token is missing or has expired
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
            # Without an answer the old token stays, and the next poll tries again.
            token_status, token = request_metadata(
                self._url, "/latest/api/token", method="PUT", headers=headers
            )
            if token_status == 200:
                self._token = token.decode()
            status, body = self._request(path)
        return status, body

    def _request(self, path: str) -> tuple[int, bytes]:
        return request_metadata(self._url, path, headers={"X-aws-ec2-metadata-token": self._token})


class AwsNoticeSource(PolledNoticeSource):
    """Polls the EC2 metadata service, unless AWS_EC2_METADATA_DISABLED is true."""

    def __init__(self, wake: Callable[[], None], interval_s: float = _POLL_INTERVAL_S) -> None:
        check = Ec2Metadata(env.lookup(ENDPOINT_ENV) or _DEFAULT_ENDPOINT).check
        # AWS SDKs obey the same variable; it is set where no metadata service can be reached.
        is_disabled = (env.lookup(DISABLED_ENV) or "").lower() == "true"
        super().__init__(
            wake, (lambda: None) if is_disabled else check, interval_s=interval_s, name="aws"
        )
