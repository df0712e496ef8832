"""Messages between worker and agent: routing by tag."""

import typing

import msgspec
import pytest

from spotfit.core.codec import encode
from spotfit.core.errors import IntegrityError
from spotfit.protocol import worker_agent
from spotfit.protocol.worker_agent import FromWorker, MetricsReport, message_tag


def test_message_tag_is_the_tag_of_each_message() -> None:
    for message_type in typing.get_args(FromWorker):
        fields = msgspec.structs.fields(message_type)
        message = message_type(**{field.name: 0 for field in fields if field.required})
        assert message_tag(encode(message)) == message_type.__struct_config__.tag


def test_every_tag_that_the_agent_routes_is_a_message() -> None:
    tags = {message_type.__struct_config__.tag for message_type in typing.get_args(FromWorker)}
    routed = {"worker_heartbeat", "request_upload", "snapshot_report", "rolled_back"}
    assert routed | {"worker_raised", "worker_returned"} <= tags


def test_a_large_message_is_not_scanned() -> None:
    frame = encode(MetricsReport(report_index=0, metrics=msgspec.Raw(b'"' + b"x" * 2**20 + b'"')))
    assert message_tag(frame) == "metrics_report"


@pytest.mark.parametrize("frame", [b"", b"garbage", b'{"report_index":0,"type":"x"}', b'{"type":"'])
def test_a_frame_without_a_leading_tag_is_rejected(frame: bytes) -> None:
    with pytest.raises(IntegrityError, match="not a message of spotfit"):
        worker_agent.message_tag(frame)
