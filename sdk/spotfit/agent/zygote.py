"""The agent's end of a zygote, and the keeper who has them ready, for one run after another."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from spotfit.core.codec import decoder, encode
from spotfit.core.ids import RunId, Token
from spotfit.host import env, log, process
from spotfit.model.cradle import Awake, Bear, Born, FromZygote, Kind, Ripe, Unfit
from spotfit.provision.launch import Assignment, Launch

_messages: msgspec.json.Decoder[FromZygote] = decoder(FromZygote)  # type: ignore[arg-type]
_PACKET_BYTES = 64 * 1024
_KEPT = 2
_LAUNCH = Launch("", RunId(""), "").environment(Token(""), 0, 0)
_OWN = (env.NOTICE_FILE, env.SCRATCH, env.HOST, env.PORT, env.STORAGE_KEYS)
_FOR_AGENTS = {*_LAUNCH, *(setting.name for setting in _OWN)}
_BARREN_LIVES = 2


@dataclass(frozen=True, slots=True)
class Breed:
    """What a zygote has in it: two breeds never mix."""

    framework: str
    python: str = sys.executable
    variables: tuple[tuple[str, str], ...] = ()
    """What must be in the environment before the first import."""

    @classmethod
    def of(cls, framework: str, python: str, variables: dict[str, str]) -> Breed:
        return cls(framework, python, tuple(sorted(variables.items())))

    def environment(self) -> dict[str, str]:
        """This process's without what it alone was told, and the run's variables on top."""
        ours = env.everything()
        return {name: ours[name] for name in ours if name not in _FOR_AGENTS} | dict(self.variables)


def variables_for(slots: int, given: dict[str, str]) -> dict[str, str]:
    """What a node's workers find in their environment: several may not each take all processors."""
    lone = slots == 1 or env.lookup("OMP_NUM_THREADS") is not None
    keys = env.value(env.STORAGE_KEYS)  # of this run's bucket: no other run may find them
    return {
        **({} if lone else {"OMP_NUM_THREADS": "1"}),
        **({env.STORAGE_KEYS.name: keys} if keys else {}),
        **given,
    }


class Zygote:
    """A process that imports what workers need, then forks one on demand.

    Raises `OSError` where no process can be started.
    """

    def __init__(self, breed: Breed) -> None:
        self.breed = breed
        self.awake = False
        self.ripe = False
        """Whether it has imported all that workers will want."""
        self.fertile = False
        """Whether it has borne a child."""
        self.unfit: str | None = None
        self._over = False
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(0)
        self._serial = 0
        with theirs:
            try:
                self._process = _process_of(breed, theirs.fileno())
            except OSError:
                self.control.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._over and self._process.poll() is None

    def bear(self, what: Kind, descriptors: Sequence[int]) -> int:
        """Ask for a child with these as its socket, output and errors; its serial number.

        Raises `OSError` where the zygote is dead; otherwise `hear` tells what became of it.
        """
        self._serial += 1
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        self.control.sendmsg([encode(Bear(self._serial, what))], rights)
        return self._serial

    def hear(self) -> list[FromZygote] | None:
        """What it said since the last call; None once it has nothing more to say, for ever."""
        messages: list[FromZygote] = []
        while True:
            try:
                packet = self.control.recv(_PACKET_BYTES)
            except BlockingIOError:
                return messages
            except OSError:
                packet = b""
            if not packet:
                self._over = True
                return messages or None
            message = _messages.decode(packet)
            self.awake = self.awake or isinstance(message, Awake)
            self.ripe = self.ripe or isinstance(message, Ripe)
            self.fertile = self.fertile or isinstance(message, Born)
            if isinstance(message, Unfit):
                self.unfit = message.why
            messages.append(message)

    def kill(self) -> None:
        """End it, and with it every child it has."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)  # it kills its children's groups, and itself
        try:
            self._process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            process.kill(self.pid)
            self._process.wait()
        self.control.close()


def _process_of(breed: Breed, descriptor: int) -> subprocess.Popen[bytes]:
    arguments = [str(descriptor), str(os.getpid()), breed.framework]
    return subprocess.Popen(  # noqa: S603 - our own module in a given interpreter
        [breed.python, "-m", "spotfit.worker.zygote", *arguments],
        env=breed.environment(),
        stdin=subprocess.DEVNULL,
        pass_fds=[descriptor],
        process_group=0,
    )


class ZygoteKeeper:
    """Has zygotes ready. Outlives a run: the next one on this machine finds them warm."""

    def __init__(self) -> None:
        self._kept: dict[Breed, Zygote] = {}
        self._barren: dict[Breed, int] = {}
        """How many of a breed died without a child: there is no point in ever more of them."""

    def begin(self, assignment: Assignment) -> None:
        """Start importing what that assignment's workers will need: nothing takes as long, so
        this comes before all else."""
        if framework := assignment.launch.framework:
            self.warm(Breed.of(framework, sys.executable, variables_for(assignment.slots, {})))

    def warm(self, breed: Breed) -> Zygote | None:
        """A living zygote of that breed, begun now if there is none; None where it may not be."""
        if sys.platform != "linux" or env.value(env.FORK) == "never":
            return None
        zygote = self._kept.pop(breed, None)
        if zygote is not None and zygote.unfit is not None:
            self._kept[breed] = zygote
            return None
        if zygote is not None and not zygote.alive:
            self._bury(zygote)
            zygote = None
        if zygote is None and self._barren.get(breed, 0) >= _BARREN_LIVES:
            return None
        try:
            self._kept[breed] = zygote = zygote or Zygote(breed)
        except OSError as refused:  # whoever needs a process now will meet this again, and tell
            log.warning("zygote.refused", why=str(refused))
        return zygote

    def spare(self, in_use: Breed) -> None:
        """End those nobody has asked for lately, but never the one in use."""
        for breed in [breed for breed in self._kept if breed != in_use][: -(_KEPT - 1)]:
            self._kept.pop(breed).kill()

    def close(self) -> None:
        """End them all."""
        for zygote in self._kept.values():
            zygote.kill()
        self._kept.clear()

    def _bury(self, zygote: Zygote) -> None:
        if not zygote.fertile:
            self._barren[zygote.breed] = self._barren.get(zygote.breed, 0) + 1
        log.warning("zygote.died", pid=zygote.pid, awake=zygote.awake)
        zygote.kill()
