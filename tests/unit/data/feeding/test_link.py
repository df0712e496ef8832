from __future__ import annotations

import fcntl
import resource
import socket
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

from spotfit.data.feeding.link import FeederLink
from spotfit.data.feeding.messages import SliceReply, receive_request, send_slice
from spotfit.data.loading.slice_tasks import SliceTask
from spotfit.data.order import OrderSettings

TASK = SliceTask(dataset="train", epoch=0, order=OrderSettings(), lane=0, number=0)


@pytest.fixture
def ends() -> Iterator[tuple[FeederLink, socket.socket]]:
    own, feeder = socket.socketpair()
    link = FeederLink(own, "feeder")
    with feeder:
        yield link, feeder
        link.close()


def test_a_task_is_sent_and_its_slice_received(ends: tuple[FeederLink, socket.socket]) -> None:
    link, feeder = ends
    link.send(7, TASK)
    request = receive_request(feeder)
    assert request is not None
    assert (request.number, request.task) == (7, TASK)
    send_slice(feeder, 7, pa.table({"x": [1]}))
    reply = link.receive()
    assert isinstance(reply, SliceReply)
    assert reply.table.equals(pa.table({"x": [1]}))


def test_the_end_of_the_feeder_is_an_error_of_the_connection(
    ends: tuple[FeederLink, socket.socket],
) -> None:
    link, feeder = ends
    feeder.close()
    with pytest.raises(OSError, match="closed the connection"):
        link.receive()


def test_an_idle_connection_is_checked_without_waiting(
    ends: tuple[FeederLink, socket.socket],
) -> None:
    link, feeder = ends
    link.check_idle()
    feeder.close()
    with pytest.raises(OSError, match="closed the connection"):
        link.check_idle()


def test_an_idle_connection_is_checked_in_a_process_with_many_open_files() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    own, feeder = socket.socketpair()
    with own, feeder:
        descriptor = fcntl.fcntl(own, fcntl.F_DUPFD, 1024)  # the first that `select` rejects
        link = FeederLink(socket.socket(fileno=descriptor), "feeder")
        link.check_idle()
        link.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_an_idle_check_of_a_closed_link_is_an_error_of_the_connection(
    ends: tuple[FeederLink, socket.socket],
) -> None:
    link, _ = ends
    link.close()
    with pytest.raises(OSError, match="closed the connection"):
        link.check_idle()


def test_closing_ends_a_receive_in_another_thread(
    ends: tuple[FeederLink, socket.socket],
) -> None:
    link, _ = ends
    errors: list[OSError] = []

    def receive() -> None:
        try:
            link.receive()
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    link.close()
    link.close()
    thread.join(30.0)
    assert len(errors) == 1
