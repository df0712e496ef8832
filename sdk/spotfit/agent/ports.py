"""What an agent needs from the machine it lives on; real ones and simulated obey the same words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from spotfit.core.ids import AgentId
from spotfit.model.assessment import Verdict
from spotfit.model.events import CheckpointCommitted
from spotfit.model.holding import Part
from spotfit.model.hooks import Ask, Hook
from spotfit.model.spec import RunSpec
from spotfit.model.watch import Trouble
from spotfit.model.wire import FromLeader, Join, Outcome, Raised, Start, ToLeader, ToWorker
from spotfit.model.world import Advice, Notice

# --- the wire between agents --------------------------------------------------------------


class FromHub(msgspec.Struct, frozen=True):
    """The leader said something to us."""

    message: FromLeader


class HubLost(msgspec.Struct, frozen=True):
    """Our connection to the hub at `address` is gone, or could not be made.

    `vanished` is True where the other side's machine told us that nobody listens there any more
    (connection reset, refused or closed); False where it only did not answer.
    """

    address: str
    why: str
    vanished: bool


class FromAgent(msgspec.Struct, frozen=True):
    """An agent said something to our hub. The first message of a connection is its `Join`."""

    agent: AgentId
    message: ToLeader


class AgentLost(msgspec.Struct, frozen=True):
    """The connection of an agent that had joined is gone."""

    agent: AgentId
    why: str


NetEvent = FromHub | HubLost | FromAgent | AgentLost


class Net(Protocol):
    """One hub that listens, one connection to the hub that leads. Nothing here ever blocks.

    Messages of one connection arrive in order or not at all. A connection that is lost is told
    once. All of it is TLS with the run's own certificate on both sides.
    """

    @property
    def hub(self) -> str:
        """host:port at which other agents reach our hub."""
        ...

    def dial(self, address: str, join: Join) -> None:
        """Connect to that hub and say `join`; a former uplink is dropped without a word.

        `address` may be our own: then messages take no wire.
        """
        ...

    def hang_up(self) -> None:
        """Drop the uplink, if there is one; no `HubLost` follows."""
        ...

    def send_up(self, message: ToLeader) -> None:
        """To the hub. Without an uplink the message is dropped: `HubLost` has told why."""
        ...

    def send_down(self, agent: AgentId, message: FromLeader) -> None:
        """To an agent that has joined our hub; dropped if it is gone."""
        ...

    def dismiss(self, agent: AgentId) -> None:
        """Close an agent's connection to our hub; no `AgentLost` follows."""
        ...

    def events(self) -> list[NetEvent]:
        """What came since the last call, in order."""
        ...


# --- the workers of this node -------------------------------------------------------------


class Said(msgspec.Struct, frozen=True):
    """A worker wrote frames; each is the JSON of a `FromWorker`."""

    round: int
    rank: int
    frames: list[msgspec.Raw]


ORPHANED = "died with the process it was forked from"
"""How a worker ends whose zygote was killed: no fault of the user's."""


UNBORN = "could not be started"
"""How a process begins to tell its end that never began to live."""


class Exited(msgspec.Struct, frozen=True):
    """A worker's process is reaped. All it said has been told before.

    `how` in words: 'exited with code 0', 'was killed by SIGKILL'. `clean` is code 0; `ordered`
    that it lived until `halt` killed it.
    """

    round: int
    rank: int
    how: str
    clean: bool
    ordered: bool = False


class Spoiled(msgspec.Struct, frozen=True):
    """No worker can ever be started here; what each of them would say, now and for ever."""

    raised: Raised


class Unheard(msgspec.Struct, frozen=True):
    """A worker has not answered for so many seconds; 0: it does again."""

    round: int
    rank: int
    silent_s: float


class Examined(msgspec.Struct, frozen=True):
    """What a worker is doing, as far as it could be found out."""

    round: int
    examination: int
    rank: int
    told: str


class CopyKept(msgspec.Struct, frozen=True):
    """Another machine has what that rank saved after that step."""

    round: int
    rank: int
    step: int
    vault: str


CrewEvent = Unheard | Examined | Said | Exited | Spoiled | CopyKept


class Crew(Protocol):
    """The user's processes on this node, one a rank. Nothing here ever blocks."""

    def prepare(self, spec: RunSpec) -> None:
        """The run is known: have whatever its workers need ready as early as possible."""
        ...

    def start(self, starts: Sequence[Start]) -> None:
        """Start a worker for each; all are of one round, and nobody of another is left."""
        ...

    def send(self, rank: int, frame: ToWorker) -> None:
        """To one worker of the running round; dropped if it is gone."""
        ...

    def examine(self, examination: int) -> None:
        """Find out what every worker is doing. `Examined` follows for each, in a while."""
        ...

    def halt(self) -> None:
        """Kill every worker and whatever it started. `Exited` follows for each."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any worker process is left."""
        ...

    @property
    def warm(self) -> bool:
        """Whether workers would start without importing anything first."""
        ...

    @property
    def carrying(self) -> int | None:
        """The round whose workers gave files away that are not all in the bucket yet.

        A finished upload is told as the worker's own `Saved`, a failed one as its `Raised`.
        """
        ...

    @property
    def held(self) -> tuple[Part, ...]:
        """What lies whole in this node's memory of the states that workers have saved. Reads them,
        and takes a while: for when no worker is left."""
        ...

    def give_up(self) -> None:
        """Upload nothing of that round any more."""
        ...

    def copy_to(self, vault: str) -> None:
        """Have that one keep the copies from now on, the last ones included; empty: none."""
        ...

    def events(self) -> list[CrewEvent]:
        """What happened since the last call, in order."""
        ...


# --- callbacks --------------------------------------------------------------------------------


class Audience(Protocol):
    """The user's callbacks, in a process of their own on the leader's node. Never blocks."""

    def reported(self, metrics: Sequence[msgspec.Raw], checkpoint: str | None) -> None:
        """The n-th report of all ranks (by rank), with the name of its committed checkpoint."""
        ...

    def failed(self, pickles: dict[int, str], told: dict[int, str]) -> None:
        """A round failed: by rank the key of its pickled exception, and its text."""
        ...

    def trouble(self) -> Trouble | None:
        """What a callback raised, if one did."""
        ...

    @property
    def caught_up(self) -> bool:
        """Whether all that was told has been heard."""
        ...


# --- a backend's hooks ------------------------------------------------------------------------


class Hooks(Protocol):
    """The hooks of the user's backend, in a process of their own on the leader's node. Never
    blocks."""

    def perform(
        self, hook: Hook, round_number: int, world_size: int, resources: Mapping[str, float]
    ) -> None:
        """Call that hook, after those ordered before."""
        ...

    def performed(self, hook: Hook, round_number: int) -> bool:
        """Whether a hook that was ordered has come back."""
        ...

    def asks(self) -> list[Ask]:
        """Calls of workers that hooks have made since the last time."""
        ...

    def answered(self, round_number: int, rank: int, outcome: Outcome) -> None:
        """What came of such a call."""
        ...

    def over(self, round_number: int) -> None:
        """The workers of that round are gone."""
        ...

    def trouble(self) -> Trouble | None:
        """What a hook raised, if one did."""
        ...

    @property
    def caught_up(self) -> bool:
        """Whether nothing is left to perform."""
        ...


# --- validations ------------------------------------------------------------------------------


class Assessor(Protocol):
    """A process of the user's that validates one checkpoint. Never blocks."""

    def begin(self, spec: RunSpec, kept: CheckpointCommitted) -> None:
        """Start it; nobody of another is left."""
        ...

    def stop(self) -> None:
        """Kill it; nothing is told of it any more."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a process is left."""
        ...

    def verdict(self) -> Verdict | None:
        """What came of it, once, when its process is gone."""
        ...


# --- the machine's own fate ---------------------------------------------------------------


class NoticeSource(Protocol):
    """Knows whether this machine will be taken away."""

    def poll(self, now: float) -> Notice | Advice | None:
        """The notice, once there is one; before that what is less than one. Never raises; never
        blocks for more than a moment."""
        ...
