from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

from spotfit.core.errors import IntegrityError
from spotfit.data.feeding import messages
from spotfit.data.feeding.messages import (
    FailureReply,
    FeederRequest,
    SliceReply,
    receive_reply,
    receive_request,
    send_failure,
    send_request,
    send_slice,
)
from spotfit.data.loading.slice_tasks import SliceTask
from spotfit.data.order import OrderSettings

Ends = tuple[socket.socket, socket.socket]
TASK = SliceTask(
    dataset="train", epoch=3, order=OrderSettings(seed=7, shuffle="rows"), lane=2, number=11
)


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_a_request_arrives_unchanged(ends: Ends) -> None:
    send_request(ends[0], FeederRequest(number=5, task=TASK))
    assert receive_request(ends[1]) == FeederRequest(number=5, task=TASK)


def test_a_slice_arrives_with_its_types(ends: Ends) -> None:
    tensor = pa.fixed_shape_tensor(pa.uint8(), (2, 2))
    images = pa.ExtensionArray.from_storage(
        tensor, pa.array([[1, 2, 3, 4]] * 3, tensor.storage_type)
    )
    table = pa.table(
        {
            "image": images,
            "text": ["a", None, "c"],
            "label": pa.array(["x", "y", "x"]).dictionary_encode(),
        }
    )
    send_slice(ends[0], 9, table)
    reply = receive_reply(ends[1])
    assert isinstance(reply, SliceReply)
    assert reply.number == 9
    assert reply.table.equals(table)
    assert reply.table.schema == table.schema


def test_the_columns_of_a_received_slice_are_aligned(ends: Ends) -> None:
    send_slice(ends[0], 1, pa.table({"x": pa.array([1.5] * 1000)}))
    reply = receive_reply(ends[1])
    assert isinstance(reply, SliceReply)
    assert reply.table.column("x").chunk(0).buffers()[1].address % 8 == 0


def test_a_slice_larger_than_the_buffer_of_the_socket_arrives(ends: Ends) -> None:
    table = pa.table({"x": range(1_000_000)})
    sender = threading.Thread(target=send_slice, args=(ends[0], 1, table))
    sender.start()
    reply = receive_reply(ends[1])
    sender.join()
    assert isinstance(reply, SliceReply)
    assert reply.table.equals(table)


def test_a_failure_arrives_with_its_traceback(ends: Ends) -> None:
    send_failure(ends[0], 4, "Traceback: bad row \ud800")
    assert receive_reply(ends[1]) == FailureReply(4, "Traceback: bad row ?")


def test_the_end_of_the_connection_is_none_also_within_a_frame(ends: Ends) -> None:
    ends[0].sendall(struct.pack(">I", 100) + b"half")
    ends[0].close()
    assert receive_reply(ends[1]) is None


@pytest.mark.parametrize(
    "body",
    [b"", b"short", struct.pack(">QQ", 1, 0) + b"no stream", struct.pack(">QQ", 1, 1) + b"\xff"],
)
def test_an_invalid_reply_is_an_integrity_error(ends: Ends, body: bytes) -> None:
    ends[0].sendall(struct.pack(">I", len(body)) + body)
    with pytest.raises(IntegrityError):
        receive_reply(ends[1])


def test_a_request_above_the_limit_is_refused_before_it_is_read(ends: Ends) -> None:
    ends[0].sendall(struct.pack(">I", 2**30))
    with pytest.raises(IntegrityError, match="the limit is"):
        receive_request(ends[1])


def test_bytes_above_the_limit_are_not_sent(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_REPLY_BYTES", 10)
    with pytest.raises(IntegrityError, match="the limit is"):
        messages.send_bytes(ends[0], b"x" * 11)
    messages.send_bytes(ends[0], b"x" * 10)
    assert messages.receive_bytes(ends[1]) == b"x" * 10
