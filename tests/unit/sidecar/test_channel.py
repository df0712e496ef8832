"""SidecarChannel: lazy start, init message, kill, close and restart."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spotfit.core.codec import decoder
from spotfit.core.errors import IntegrityError
from spotfit.protocol.agent_sidecar import UploadDone
from spotfit.sidecar.channel import SidecarChannel
from tests.unit.sidecar.fake_process import FakeProcess, FakeStarter


class Owner:
    """The user of a channel; `restarts` makes it restart the process after an exit."""

    def __init__(self, *, restarts: bool = False) -> None:
        self.starter = FakeStarter()
        self.messages: list[UploadDone] = []
        self.exits: list[str] = []
        self.restarts = restarts
        self.channel = SidecarChannel(
            self.starter.start,
            decoder=decoder(UploadDone),
            on_message=self.messages.append,
            on_exit=self.on_exit,
            init={"type": "init"},
        )

    def on_exit(self, reason: str) -> None:
        self.exits.append(reason)
        if self.restarts:
            self.channel.forget()


def test_the_first_message_starts_the_process_and_follows_the_init_message() -> None:
    owner = Owner()
    assert not owner.channel.is_started
    owner.channel.send({"type": "a"})
    owner.channel.send({"type": "b"})
    assert len(owner.starter.processes) == 1
    assert owner.starter.latest.received_types == ["init", "a", "b"]
    assert owner.channel.is_started


def test_messages_and_the_exit_are_passed_to_the_owner() -> None:
    owner = Owner()
    owner.channel.send({"type": "a"})
    owner.starter.latest.reply(
        UploadDone(job_id=1, size_bytes=10), UploadDone(job_id=2, size_bytes=20)
    )
    owner.starter.latest.exit("exited with code 3")
    assert owner.messages == [
        UploadDone(job_id=1, size_bytes=10),
        UploadDone(job_id=2, size_bytes=20),
    ]
    assert owner.exits == ["exited with code 3"]


@pytest.mark.parametrize(("restarts", "processes"), [(False, 1), (True, 2)])
def test_a_message_after_the_exit_starts_a_process_only_if_the_first_is_forgotten(
    restarts: bool, processes: int
) -> None:
    owner = Owner(restarts=restarts)
    owner.channel.send({"type": "a"})
    owner.starter.latest.exit()
    owner.channel.send({"type": "b"})
    assert len(owner.starter.processes) == processes


def test_a_killed_process_still_reports_its_exit() -> None:
    owner = Owner()
    owner.channel.kill()
    owner.channel.send({"type": "a"})
    owner.channel.kill()
    assert owner.starter.latest.killed
    assert owner.channel.is_started
    owner.starter.latest.exit()
    assert owner.exits == ["was killed by SIGKILL"]


def test_a_closed_process_is_ignored_and_replaced() -> None:
    owner = Owner()
    owner.channel.close()
    owner.channel.send({"type": "a"})
    closed = owner.starter.latest
    owner.channel.close()
    owner.channel.send({"type": "b"})
    closed.reply(UploadDone(job_id=1, size_bytes=10))
    closed.exit()
    assert (closed.killed, owner.messages, owner.exits) == (True, [], [])
    assert owner.starter.latest.received_types == ["init", "b"]


def test_a_process_that_exits_while_it_is_started_is_not_kept() -> None:
    owner = Owner(restarts=True)

    def fail_to_start(
        on_frames: Callable[[list[bytes]], None], on_exit: Callable[[str, bool], None]
    ) -> FakeProcess:
        on_exit("could not be started", False)
        return FakeProcess(on_frames, on_exit)

    owner.channel._start_process = fail_to_start
    owner.channel.send({"type": "a"})
    assert not owner.channel.is_started
    assert owner.exits == ["could not be started"]


@pytest.mark.parametrize(
    "frame",
    [b"", b"garbage", b'{"type":"dance"}', b"[" * 5_000, b'{"type":"upload_done"}', b"\xff"],
)
def test_a_frame_that_is_not_a_message_is_rejected(frame: bytes) -> None:
    owner = Owner()
    owner.channel.send({"type": "a"})
    with pytest.raises(IntegrityError, match="is not a message of spotfit"):
        owner.starter.latest.reply_bytes(frame)
    assert owner.messages == []
