"""A vault keeps what a peer sends whole, gives out what is asked for, and hears no strangers."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.agent import vault
from spotfit.agent.copies import Shelf
from spotfit.agent.snapshots import Snapshots
from spotfit.agent.vault import Vault
from spotfit.checkpoint.peer import PATIENCE_S, InPeer, connected
from spotfit.checkpoint.segment import Segment
from spotfit.core.codec import encode
from spotfit.core.errors import IntegrityError
from spotfit.host import frames
from spotfit.model.holding import Part, State
from spotfit.model.vault import Keep, Look
from spotfit.ship.certificate import contexts
from spotfit.ship.sign import RunKey
from spotfit.testing.builders import RUN
from spotfit.testing.clock import ManualClock
from tests.unit.agent.dues import due
from tests.unit.checkpoint.snapshots import BIG, bytes_of, filled
from tests.unit.worker.agent_end import start

SECRET = RunKey(bytes(range(32)), RUN).to_text()
TLS = contexts(SECRET, RUN)
STATE = State(3, 9)


class Machine:
    """An agent's snapshots and its vault."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()
        self.snapshots = Snapshots(str(folder))
        self.vault = Vault(
            self.snapshots.shelf,
            self.snapshots.find,
            tls=TLS,
            host="127.0.0.1",
            clock=ManualClock(0.0),
        )

    def saves(self, rank: int, bodies: list[bytes], number: int = 3, step: int = 9) -> Path:
        path = self.folder / f"{number}-{rank}-1.segment"
        return filled(path, bodies, rank=rank, world_size=2, step=step)


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "ours")
    with contextlib.closing(machine.vault):
        yield machine


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "theirs")
    with contextlib.closing(machine.vault):
        yield machine


def copied(one: Machine, path: Path, other: Machine, report: int = 0) -> None:
    """As the thread that sends does it; what goes wrong is raised here."""
    one.vault._send(due(path, other.vault.address, report=report))


def test_a_copy_is_held_and_can_be_read_like_the_first(ours: Machine, theirs: Machine) -> None:
    bodies = [bytes_of(1, 5 * BIG), b"small"]
    copied(ours, ours.saves(1, bodies), theirs)
    part = Part(STATE, 1, 2)
    assert theirs.snapshots.held() == (part,)
    remote = InPeer(theirs.vault.address, part, TLS.client)
    assert (remote.index.rank, remote.index.step) == (1, 9)
    read = b"".join(remote.fetch(chunk) for chunk in remote.index.chunks)
    for piece, body in zip(remote.index.pieces, bodies, strict=True):
        assert read[piece.start : piece.end] == body


def test_in_the_background_copies_are_sent_one_after_the_other(
    ours: Machine, theirs: Machine
) -> None:
    kept: queue.SimpleQueue[tuple[int, int, int, str]] = queue.SimpleQueue()
    ours.vault.kept = lambda *told: kept.put(told)
    to = theirs.vault.address
    for number, rank in ((3, 0), (3, 1), (4, 0)):
        ours.vault.copy(due(ours.saves(rank, [b"x"], number=number), to, fellows=(0, 1)))
        assert kept.get(timeout=60) == (number, rank, 9, to)


def test_what_lies_there_already_is_not_sent_again(ours: Machine, theirs: Machine) -> None:
    path = ours.saves(1, [bytes_of(1, 5 * BIG)])
    copied(ours, path, theirs)
    (lies,) = theirs.snapshots.shelf.folder.iterdir()
    before = lies.stat().st_ino
    copied(ours, path, theirs)
    assert lies.stat().st_ino == before
    copied(ours, path, theirs, report=1)
    assert [part.state.step for part in theirs.snapshots.held()] == [9]


def test_after_a_failure_what_is_new_is_sent(ours: Machine, theirs: Machine) -> None:
    kept: queue.SimpleQueue[tuple[int, int, int, str]] = queue.SimpleQueue()
    ours.vault.kept = lambda *told: kept.put(told)
    gone = due(ours.saves(0, [b"x"]), theirs.vault.address)
    gone.segment.unlink()
    with pytest.raises(IntegrityError):
        ours.vault._send(gone)
    ours.vault.copy(gone)
    path = ours.saves(0, [b"y"], number=4)
    ours.vault.copy(due(path, theirs.vault.address))
    assert kept.get(timeout=60)[0] == 4


def test_copies_of_rounds_before_are_freed(ours: Machine, theirs: Machine) -> None:
    copied(ours, ours.saves(0, [b"x"]), theirs)
    copied(ours, ours.saves(0, [b"x"], number=12, step=20), theirs)
    assert theirs.snapshots.held() == (Part(State(12, 20), 0, 2),)


def test_a_straggler_of_a_round_before_is_refused(ours: Machine, theirs: Machine) -> None:
    copied(ours, ours.saves(0, [b"x"], number=4), theirs)
    with pytest.raises(IntegrityError, match="did not keep"):
        copied(ours, ours.saves(1, [b"x"], number=3), theirs)
    assert theirs.snapshots.held() == (Part(State(4, 9), 0, 2),)


def test_a_straggler_is_refused_though_it_had_come_first(ours: Machine, theirs: Machine) -> None:
    with connected(theirs.vault.address, TLS.client) as wire:
        frames.write(wire, encode(Keep(3, 0, 1, (1,), 1)))
        assert frames.read(wire) == b""
        copied(ours, ours.saves(0, [b"x"], number=4), theirs)
        frames.write(wire, b"x")
        frames.write(wire, b"")
        assert frames.read(wire) is None
    assert theirs.snapshots.held() == (Part(State(4, 9), 0, 2),)


def test_of_each_rank_the_last_two_are_kept_whatever_clocks_say(
    ours: Machine, theirs: Machine
) -> None:
    for n in range(4):
        path = filled(ours.folder / f"3-1-{n}.segment", [b"x"], rank=1, world_size=2, step=n)
        copied(ours, path, theirs, report=n)
        for copy in theirs.snapshots.shelf.folder.iterdir():
            os.utime(copy, (2**31 - n, 2**31 - n))
    assert [part.state.step for part in theirs.snapshots.held()] == [2, 3]


def test_of_one_state_that_was_saved_twice_the_last_is_held(ours: Machine, theirs: Machine) -> None:
    for report, body in ((9, b"old"), (10, b"new")):
        name, body_s = f"3-1-{report}.segment", [body]
        path = filled(ours.folder / name, body_s, world_size=2, rank=1, step=9, save=report)
        copied(ours, path, theirs, report=report)
    part = Part(STATE, 1, 2)
    assert theirs.snapshots.held() == (part,)
    remote = InPeer(theirs.vault.address, part, TLS.client)
    assert bytes(remote.fetch(remote.index.chunks[0])) == b"new"


def test_a_connection_that_ends_takes_nothing_from_another(theirs: Machine, tmp_path: Path) -> None:
    """A stalled one, and the one that was made in its place."""
    body = filled(tmp_path / "one", [b"x"], rank=1, world_size=2, step=9).read_bytes()
    keep = encode(Keep(3, 0, 1, (1,), len(body)))
    with (
        connected(theirs.vault.address, TLS.client) as stalled,
        connected(theirs.vault.address, TLS.client) as wire,
    ):
        for one in (stalled, wire):
            frames.write(one, keep)
            assert frames.read(one) == b""
        frames.write(stalled, b"")
        assert frames.read(stalled) is None
        frames.write(wire, body)
        frames.write(wire, b"")
        assert frames.read(wire) == b""
    assert theirs.snapshots.held() == (Part(STATE, 1, 2),)


def test_a_segment_written_anew_while_it_is_sent_is_no_copy(ours: Machine, theirs: Machine) -> None:
    path = ours.saves(0, [bytes_of(1, 5 * BIG)])

    class Meanwhile(ManualClock):
        def wait(self, seconds: float) -> None:
            path.write_bytes(bytes(path.stat().st_size))

    ours.vault._clock = Meanwhile(0.0)
    with pytest.raises(IntegrityError, match="written anew"):
        copied(ours, path, theirs)
    assert theirs.snapshots.held() == ()


def test_what_was_taken_back_is_gone_on_from_by_nobody(ours: Machine, theirs: Machine) -> None:
    """Step 9 is committed; 12 was lost on its way, but each machine has it of the other."""
    machines = ours, theirs
    for rank, (one, other) in enumerate((machines, machines[::-1])):
        one.snapshots.enter(start(round=3, rank=rank, world_size=2))
        for report, step in ((4, 9), (5, 12)):
            segment = one.folder / f"3-{rank}-{report}.segment"
            copied(one, filled(segment, [b"x"], rank=rank, world_size=2, step=step), other, report)
            segment.unlink()
    assert [len(one.snapshots.held()) for one in machines] == [2, 2]
    for one in machines:
        one.snapshots.take_back(6)
    assert [one.snapshots.held() for one in machines] == [(), ()]
    later = filled(ours.folder / "3-0-6.segment", [b"x"], world_size=2, step=12)
    with pytest.raises(IntegrityError, match="did not keep"):
        copied(ours, later, theirs, 5)
    copied(ours, later, theirs, 6)
    assert theirs.snapshots.held() == (Part(State(3, 12), 0, 2),)


def test_half_a_copy_is_none(theirs: Machine) -> None:
    with connected(theirs.vault.address, TLS.client) as wire:
        frames.write(wire, encode(Keep(3, 1, 0, (0,), 10)))
        assert frames.read(wire) == b""
        frames.write(wire, b"half")
        frames.write(wire, b"")
        assert frames.read(wire) is None, "nobody keeps it"
    assert list(theirs.snapshots.shelf.folder.iterdir()) == []


def test_a_copy_for_an_agent_that_has_left_is_refused(ours: Machine, theirs: Machine) -> None:
    """Memory that nobody owns would never be freed."""
    segment = ours.saves(1, [b"small"])
    shutil.rmtree(theirs.folder)
    with pytest.raises((OSError, IntegrityError)):
        copied(ours, segment, theirs)
    assert not theirs.folder.exists()


def test_what_is_gone_is_told(theirs: Machine) -> None:
    with pytest.raises(IntegrityError, match="not there any more"):
        InPeer(theirs.vault.address, Part(STATE, 0, 2), TLS.client)
    theirs.saves(0, [b"x"])
    theirs.snapshots.held()
    remote = InPeer(theirs.vault.address, Part(STATE, 0, 2), TLS.client)
    (theirs.folder / "3-0-1.segment").unlink()
    with pytest.raises(IntegrityError, match="cannot be had"):
        remote.fetch(remote.index.chunks[0])


def test_a_machine_that_is_gone_is_told(theirs: Machine) -> None:
    theirs.vault.close()
    with pytest.raises(IntegrityError, match=theirs.vault.address):
        InPeer(theirs.vault.address, Part(STATE, 0, 2), TLS.client)


@pytest.mark.parametrize(("host", "begins"), [("localhost", "127.0.0.1:"), ("::1", "[::1]:")])
def test_it_listens_at_any_address_of_its_machine(tmp_path: Path, host: str, begins: str) -> None:
    vault = Vault(Shelf(tmp_path), lambda _: None, tls=TLS, host=host, clock=ManualClock(0.0))
    with contextlib.closing(vault), connected(vault.address, TLS.client):
        assert vault.address.startswith((begins, "[::1]:"))


def test_who_does_not_hold_the_runs_key_is_not_heard(theirs: Machine) -> None:
    theirs.saves(0, [b"x"])
    theirs.snapshots.held()
    stranger = contexts(RunKey(bytes(32), RUN).to_text(), RUN)
    with pytest.raises(IntegrityError):
        InPeer(theirs.vault.address, Part(STATE, 0, 2), stranger.client)
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname = False
    anonymous.verify_mode = ssl.CERT_NONE
    with pytest.raises(IntegrityError):
        InPeer(theirs.vault.address, Part(STATE, 0, 2), anonymous)


def test_a_full_segment_keeps_its_seal_until_it_is_written_anew(tmp_path: Path) -> None:
    with Segment.open(filled(tmp_path / "one", [b"x"], step=1)) as one:
        assert one.seal == one.seal
        with Segment.open(filled(tmp_path / "two", [b"x"], step=2)) as two:
            assert one.seal != two.seal


def test_what_a_later_copy_has_replaced_is_not_given_out_as_what_it_was(
    ours: Machine, theirs: Machine
) -> None:
    """Who asks was told before of what is held: it would put two steps together."""
    copied(ours, ours.saves(1, [b"first"]), theirs)
    part = Part(STATE, 1, 2)
    assert theirs.snapshots.held() == (part,)
    remote = InPeer(theirs.vault.address, part, TLS.client)
    for report in (1, 2):
        (ours.folder / "3-1-1.segment").unlink()
        copied(ours, ours.saves(1, [b"later"], step=12), theirs, report)
    with pytest.raises(IntegrityError, match="cannot be had"):
        remote.fetch(remote.index.chunks[0])
    with pytest.raises(IntegrityError, match="cannot be had"):
        InPeer(theirs.vault.address, part, TLS.client)


def test_a_question_waits_for_nobody_to_acknowledge_what_went_before(theirs: Machine) -> None:
    with connected(theirs.vault.address, TLS.client) as wire:
        assert wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_who_finds_no_place_waits_for_one(ours: Machine, theirs: Machine) -> None:
    """One who was sent away would have all ranks give up the state in memory."""
    copied(ours, ours.saves(1, [b"small"]), theirs)
    part = Part(STATE, 1, 2)
    assert theirs.snapshots.held() == (part,)
    with contextlib.ExitStack() as places:
        guests = [
            places.enter_context(connected(theirs.vault.address, TLS.client))
            for _ in range(vault._GUESTS)
        ]
        host, _, port = theirs.vault.address.rpartition(":")
        with socket.create_connection((host, int(port)), 60) as plain:
            frames.write(guests[0], encode(Look(part)))
            assert frames.read(guests[0]), "it leaves"
            with TLS.client.wrap_socket(plain) as late:
                frames.write(late, encode(Look(part)))
                assert frames.read(late)


@pytest.mark.real_time("how long a silent socket is borne with")
def test_who_says_nothing_loses_its_place(theirs: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault, "_GREETING_S", 0.01)
    host, _, port = theirs.vault.address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S / 2) as silent:
        assert silent.recv(1) == b""
