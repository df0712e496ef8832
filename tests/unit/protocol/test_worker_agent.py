"""Messages between worker and agent: routing by tag."""

import typing
from typing import Any

import msgspec
import pytest

from spotfit.core.codec import encode
from spotfit.core.errors import IntegrityError
from spotfit.model.reporting import MAX_METRICS_DEPTH, metrics_to_json
from spotfit.protocol import worker_agent
from spotfit.protocol.worker_agent import (
    FromWorker,
    MetricsReport,
    RankZeroBroadcast,
    WorkerReturned,
    decode_worker_message,
    message_tag,
)
from tests.unit.protocol.invalid_frames import INVALID_FRAMES


def test_message_tag_is_the_tag_of_each_message() -> None:
    for message_type in typing.get_args(FromWorker):
        fields = msgspec.structs.fields(message_type)
        message = message_type(**{field.name: 0 for field in fields if field.required})
        assert message_tag(encode(message)) == message_type.__struct_config__.tag


def test_every_tag_that_the_agent_routes_is_a_message() -> None:
    tags = {message_type.__struct_config__.tag for message_type in typing.get_args(FromWorker)}
    routed = {"worker_heartbeat", "request_upload", "snapshot_report", "rolled_back"}
    assert routed | {"worker_raised", "worker_returned"} <= tags


@pytest.mark.parametrize("name", INVALID_FRAMES)
def test_an_invalid_frame_is_rejected_with_its_kind(name: str) -> None:
    frame = INVALID_FRAMES[name]
    kind = (
        frame[9:].split(b'"')[0][:40].decode() if frame.startswith(b'{"type"') else "not a message"
    )
    with pytest.raises(IntegrityError, match=kind):
        decode_worker_message(frame)


@pytest.mark.parametrize(
    "message",
    [
        MetricsReport(report_index=0, metrics=msgspec.Raw(metrics_to_json({"loss": float("nan")}))),
        WorkerReturned(report_count=3, pickled_value=b"x" * (32 * 2**20)),
        RankZeroBroadcast(kind="barrier", seq=0),
    ],
)
def test_a_message_of_a_worker_is_accepted(message: FromWorker) -> None:
    assert encode(decode_worker_message(encode(message))) == encode(message)


def test_metrics_as_deep_as_a_report_may_have_are_accepted() -> None:
    nested: Any = float("nan")
    for _ in range(MAX_METRICS_DEPTH - 1):
        nested = [nested]
    report = MetricsReport(report_index=0, metrics=msgspec.Raw(metrics_to_json({"a": nested})))
    assert decode_worker_message(encode(report)) == report


def test_a_large_message_is_not_scanned() -> None:
    frame = encode(MetricsReport(report_index=0, metrics=msgspec.Raw(b'"' + b"x" * 2**20 + b'"')))
    assert message_tag(frame) == "metrics_report"


@pytest.mark.parametrize("frame", [b"", b"garbage", b'{"report_index":0,"type":"x"}', b'{"type":"'])
def test_a_frame_without_a_leading_tag_is_rejected(frame: bytes) -> None:
    with pytest.raises(IntegrityError, match="not a message of spotfit"):
        worker_agent.message_tag(frame)
