"""Every message that crosses a process border inside a round.

Two hops, two unions each way:

    worker  ── FromWorker ──▶  agent  ── ToLeader ──▶  leader's hub
    worker  ◀── ToWorker  ───  agent  ◀── FromLeader ──  leader's hub

What a worker says to the hub travels inside `Up`, what the hub says to workers inside `Down`;
the agents between only pass it on.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from spotfit.model.cadence import Odds
from spotfit.model.events import Blame, RankFailure, ValidationAsked
from spotfit.model.holding import Part, State
from spotfit.model.world import Member, Notice

Stage = Literal["form", "train", "leave"]
"""What a worker does next, where a backend has hooks between: form the framework's group, call the
training function, end."""

# --- worker -> agent -------------------------------------------------------------------------


class Running(msgspec.Struct, frozen=True, tag="running"):
    """The user's function is about to be called."""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """This process still runs; said now and then, for the agent alone."""


class Present(msgspec.Struct, frozen=True, tag="present"):
    """This worker can be called, and waits for `Proceed`. To leave, `Returned` says the same."""

    stage: Stage


class Outcome(msgspec.Struct, frozen=True, tag="outcome"):
    """What came of a `Call`: a pickle, of what was returned or of what was raised."""

    call: int
    value: bytes
    raised: str | None = None
    """The traceback, where it raised; `value` is empty where that cannot be pickled."""


class Report(msgspec.Struct, frozen=True, tag="report"):
    """The n-th report of this rank in this round (n from 0), without files of its own.

    Nothing waits for it.
    """

    n: int
    metrics: msgspec.Raw
    dir_name: str | None = None


class Files(msgspec.Struct, frozen=True, tag="files"):
    """The n-th report of this rank, with a checkpoint that wants a name; answered by `Named`."""

    n: int
    metrics: msgspec.Raw
    dir_name: str | None = None
    blocks: bool = False
    """Whether the training function itself waits for the name, and does nothing else."""
    validation: ValidationAsked | None = None
    ours: bool = True
    """Whether spotfit uploads the files; else the user does, or has, wherever he wants them."""
    shares: bool = False
    """Whether what is uploaded may share files of a checkpoint that is committed: `Named.base`."""
    why: str = ""
    """Why it is saved just now, where a Checkpointer has decided that."""


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """The n-th report of this rank comes with a snapshot, whole in this segment of shared memory.

    The agent sees to everything else, even if this worker dies: to the hub it says `Files`, and
    takes the snapshot to the bucket once it has a name. The worker leaves the segment alone until
    it hears `Carried` or `Uncarried`.
    """

    n: int
    metrics: msgspec.Raw
    segment: str
    why: str = ""
    """Why it is saved just now."""


class Unsaved(msgspec.Struct, frozen=True, tag="unsaved"):
    """This rank's files of its n-th report will not come: there is no such checkpoint."""

    n: int
    why: str


class Damaged(msgspec.Struct, frozen=True, tag="damaged"):
    """A committed checkpoint could not be read: nothing that comes after may share its files."""

    name: str


class TakenBack(msgspec.Struct, frozen=True, tag="taken_back"):
    """The training goes back to a checkpoint, with all ranks; for the agent alone.

    From what memory has of the round's reports before that one, or of rounds before, nobody is to
    go on any more.
    """

    before: int


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """This rank's files of its n-th report, and its manifest, are in the bucket."""

    n: int
    name: str
    size_bytes: int = 0
    step: int | None = None
    """Of a snapshot: how many steps were done."""
    at: str = ""
    """The folder where the user has put them, if it was him."""


class Carry(msgspec.Struct, frozen=True, tag="carry"):
    """Take my files of the n-th report to the bucket, after those before; answered by `Carried`.

    The agent sees to it even if this worker dies.
    """

    n: int
    name: str
    parcel: bytes
    """Pickled by the worker for the process that uploads; nobody else opens it."""


class Gather(msgspec.Struct, frozen=True, tag="gather"):
    """Take part in the `seq`-th collective of this kind; answered by `Gathered`.

    Everybody receives rank 0's value once all ranks have come.
    """

    kind: str
    seq: int
    value: bytes = b""
    blocks: bool = False
    """Whether the training function itself waits for the others, and does nothing else."""


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """The function came back and all uploads are done; `value` is its pickle (rank 0's is kept)."""

    reports: int
    value: bytes = b""


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """The function raised; `told` is the traceback, `value` the pickled exception if it has one.

    `blame`, of a worker that could not be prepared, and `final` are those of `RankFailure`.
    """

    told: str
    value: bytes = b""
    blame: Blame | None = None
    final: bool = False


FromWorker = (
    Running
    | Alive
    | Present
    | Outcome
    | Report
    | Files
    | Snapshot
    | Damaged
    | TakenBack
    | Saved
    | Unsaved
    | Carry
    | Gather
    | Returned
    | Raised
)

# --- agent -> worker -------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Who you are, and what to run. The first frame a worker reads."""

    run_id: str
    run_name: str
    round: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    host: str
    """Address of this node, as other nodes reach it."""
    storage_url: str
    framework: str
    framework_options: dict[str, Any]
    luggage: dict[str, Any]
    checkpoint: str | None = None
    checkpoint_metrics: dict[str, Any] | None = None
    snapshots: bool = False
    """Whether a committed checkpoint is a Checkpointer's; the one to begin from need not be."""
    devices: tuple[str, ...] = ()
    scratch: str = ""
    """A directory of this run on this node, shared by its workers."""
    segments: str = ""
    """Where this node's snapshots lie; empty where nobody would bring them to the bucket."""
    memory: State | None = None
    """The state to begin from, if that lies in memory and is newer than the checkpoint."""
    remembered: tuple[str, ...] = ()
    """By the ranks that saved it, the segments it lies in; empty for those that lie elsewhere."""
    elsewhere: tuple[str, ...] = ()
    """By the ranks that saved it, the vaults of machines where parts lie that do not lie here."""
    copies_to: str = ""
    """The vault that is to keep copies of this node's snapshots, for the agent alone."""
    collective_timeout_s: float | None = None
    relax_collectives: bool = False
    hooks: bool = False
    """Whether a backend has hooks: then the worker waits to be told how to go on."""
    share_devices: bool = False
    """Whether the workers of a node see each other's accelerators, whatever their framework."""
    pulse_s: float = 0.0
    """How often to say `Alive`; 0: never."""
    log_level: str = "INFO"
    secret: str = ""
    """The run's key, as text; it never stands in argv, journal or logs."""
    odds: Odds = Odds()
    spec: msgspec.Raw = msgspec.Raw(b"null")
    """The whole RunSpec, for context objects."""

    def __repr__(self) -> str:
        return f"Start(run={self.run_name!r}, round={self.round}, rank={self.rank})"


class Proceed(msgspec.Struct, frozen=True, tag="proceed"):
    """The hooks before that stage are done."""

    stage: Stage


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Call a pickled function with its arguments; answered by `Outcome`."""

    call: int
    body: bytes


class Named(msgspec.Struct, frozen=True, tag="named"):
    """All ranks have made their n-th report: its directory, who brings files, rank 0's metrics.

    Without a name it was made without this rank, whose files nobody waits for any more.
    """

    n: int
    name: str
    ranks: tuple[int, ...]
    metrics: msgspec.Raw
    base: str = ""
    """A checkpoint that is not deleted before this one is saved: its files may be shared."""


class Uncarried(msgspec.Struct, frozen=True, tag="uncarried"):
    """What this worker brought with its n-th report is no checkpoint; there may be others."""

    n: int
    why: str


class Carried(msgspec.Struct, frozen=True, tag="carried"):
    """What this worker gave away with its n-th report is in the bucket."""

    n: int
    name: str


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """The journal says that checkpoint exists."""

    name: str
    metrics: dict[str, Any]


class Judged(msgspec.Struct, frozen=True, tag="judged"):
    """A validation has ended, and the journal says how."""

    name: str


class Gathered(msgspec.Struct, frozen=True, tag="gathered"):
    """The collective is complete. With `missing` it never will be: those ranks did not come.

    `why` is empty where it timed out waiting for them. The kind 'report' answers `Files` so.
    """

    kind: str
    seq: int
    value: bytes = b""
    missing: tuple[int, ...] = ()
    why: str = ""


class Overdue(msgspec.Struct, frozen=True, tag="overdue"):
    """A collective has waited for so long, and still does, for those ranks."""

    kind: str
    missing: tuple[int, ...]
    waited_s: float


class Preempted(msgspec.Struct, frozen=True, tag="preempted"):
    """Nodes of this round will be taken away: node id to its ranks."""

    deadline_ms: int
    """When the first of them goes; 0 when nobody knows."""
    nodes: dict[str, tuple[int, ...]]
    replaced: bool = False
    """Whether the next round could open at once: then only a save is waited for."""


class SaveSoon(msgspec.Struct, frozen=True, tag="save_soon"):
    """A machine of the round is in danger, and will perhaps never be taken away."""

    reason: str


ToWorker = (
    Start
    | Proceed
    | Call
    | Named
    | Carried
    | Uncarried
    | Committed
    | Judged
    | Gathered
    | Overdue
    | Preempted
    | SaveSoon
)

# --- agent -> leader -------------------------------------------------------------------------


class Join(msgspec.Struct, frozen=True, tag="join"):
    """The first message on a connection: this agent is here, and has read so far."""

    run_id: str
    member: Member
    next_slot: int
    running: int | None = None
    """Number of the round whose workers still live here."""
    notice: Notice | None = None
    warm: bool = True
    """Whether its workers would start without importing anything first."""
    entered: int = -1
    """The last round it entered, or was told to end: it enters none up to that one any more."""
    carrying: int | None = None
    """The round whose checkpoints it still uploads though its workers are gone."""
    unable: RankFailure | None = None
    """Why no worker can ever be started there, as a failure of rank 0."""
    held: tuple[Part, ...] = ()
    """What lies in its memory of the states that its workers have saved."""


class Unable(msgspec.Struct, frozen=True, tag="unable"):
    """No worker can ever be started on this machine."""

    failure: RankFailure


class Warm(msgspec.Struct, frozen=True, tag="warm"):
    """From now on workers start here without importing anything first."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Still here."""


class Alarm(msgspec.Struct, frozen=True, tag="alarm"):
    """This agent's machine announced its end."""

    notice: Notice


class Advise(msgspec.Struct, frozen=True, tag="advise"):
    """This agent's machine is in danger, says its cloud."""

    reason: str


class Up(msgspec.Struct, frozen=True, tag="up"):
    """What a worker said, passed on: one frame after the other, each a `FromWorker`."""

    round: int
    rank: int
    frames: list[msgspec.Raw]


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A worker process is gone. `failure` is None where its function had returned."""

    round: int
    rank: int
    failure: RankFailure | None = None


class Unwell(msgspec.Struct, frozen=True, tag="unwell"):
    """A worker of that round has not answered for so many seconds; 0: it does again."""

    round: int
    rank: int
    silent_s: float


class Stacks(msgspec.Struct, frozen=True, tag="stacks"):
    """What a worker is doing, as its machine could find out."""

    round: int
    examination: int
    rank: int
    told: str


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """No worker of that round lives here any more."""

    round: int
    carrying: bool = False
    """Whether checkpoints they gave away are still being uploaded; `Delivered` follows."""
    held: tuple[Part, ...] = ()
    """What lies in its memory of the states that they and others before them have saved."""


class Delivered(msgspec.Struct, frozen=True, tag="delivered"):
    """No checkpoint of that round is being uploaded here any more."""

    round: int


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """That rank's part of a state lies with another machine, too."""

    round: int
    rank: int
    step: int
    vault: str
    """Where."""


class Assessed(msgspec.Struct, frozen=True, tag="assessed"):
    """What came of that attempt to validate a checkpoint. Told again to every new leader.

    'lost': nothing, by no fault of the user's; it is to be begun again.
    """

    attempt: int
    status: Literal["validated", "failed", "timeout", "lost"]
    metrics: dict[str, Any] = {}
    why: str = ""


ToLeader = (
    Join
    | Unable
    | Warm
    | Beat
    | Alarm
    | Advise
    | Up
    | Ended
    | Unwell
    | Stacks
    | Stopped
    | Delivered
    | Copied
    | Assessed
)

# --- leader -> agent -------------------------------------------------------------------------


class News(msgspec.Struct, frozen=True, tag="news"):
    """A journal entry that was just written: a copy to spare a read, worth no more than that."""

    slot: int
    body: bytes


class Halt(msgspec.Struct, frozen=True, tag="halt"):
    """The round is lost: end its workers now; the journal will say so in a moment."""

    round: int


class Examine(msgspec.Struct, frozen=True, tag="examine"):
    """Tell what each worker of that round is doing, as `Stacks`."""

    round: int
    examination: int


class Down(msgspec.Struct, frozen=True, tag="down"):
    """For workers of that round: one rank, or all that live there (rank None)."""

    round: int
    rank: int | None
    frame: ToWorker


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """This hub does not take you: it does not lead, or leads another run."""

    why: Literal["not_leading", "other_run"]


FromLeader = News | Halt | Examine | Down | Beat | Rejected
