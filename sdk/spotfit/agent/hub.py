"""The meeting point of one round: reports matched by number, names agreed, collectives completed.

Pure bookkeeping: frames in, frames out, no wire. It holds nothing that must outlive the round.

The n-th report of every rank is one report of the group. A rank without files does not wait; a
rank with files waits until all ranks have made their n-th report, because the name is rank 0's to
choose and the manifest must tell who else brings files.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import msgspec

from spotfit.agent.collectives import REPORT, Answer, Collectives, Key
from spotfit.core.codec import decoder
from spotfit.model.events import ValidationAsked
from spotfit.model.watch import Progress, Ready
from spotfit.model.wire import (
    Damaged,
    Files,
    FromWorker,
    Gather,
    Gathered,
    Named,
    Outcome,
    Present,
    Report,
    Returned,
    Running,
    Saved,
    Stage,
    Uncarried,
    Unsaved,
)

BACKLOG = 10_000
"""Reports a rank may be ahead of the slowest before the metrics of the oldest are forgotten."""

_frames: msgspec.json.Decoder[FromWorker] = decoder(FromWorker)  # type: ignore[arg-type]
_metrics: msgspec.json.Decoder[dict[str, Any]] = decoder(dict[str, Any])
_NOTHING = msgspec.Raw(b"{}")


class Told(msgspec.Struct, frozen=True):
    """One report of the whole group, for callbacks and the metrics file."""

    n: int
    metrics: tuple[msgspec.Raw, ...]
    checkpoint: str | None


class Given(NamedTuple):
    """A checkpoint's name, and whether the hub made it up."""

    name: str
    made: bool


class Hub:
    """One round. `name_for(n)` makes a directory name when rank 0 gave none; `last_called(name)` is
    the checkpoint of earlier rounds that has one it gave, '' if that is gone, None for a new one.
    """

    def __init__(
        self,
        round_number: int,
        world_size: int,
        *,
        name_for: Callable[[int], str],
        base_for: Callable[[], str] = str,
        last_called: Callable[[str], str | None] = lambda _: None,
        collective_timeout_s: float | None = None,
        collective_warn_s: float = 60.0,
        keep_all: bool = False,
        now: float = 0.0,
    ) -> None:
        self.round = round_number
        self.world_size = world_size
        self._name_for = name_for
        self._base_for = base_for
        self._last_called = last_called
        self._uses: dict[str, str] = {}
        """By the name that rank 0 chose, the last one that was given for it in this round."""
        self._keep_all = keep_all
        self._made = [0] * world_size
        self._kept: list[dict[int, tuple[msgspec.Raw, str | None]]] = [
            {} for _ in range(world_size)
        ]
        self._collectives = Collectives(
            world_size, timeout_s=collective_timeout_s, warn_s=collective_warn_s
        )
        self._coming: defaultdict[int, _Coming] = defaultdict(_Coming)
        """Reports that bring files, before all ranks have made theirs."""
        self._saving: dict[int, _Saving] = {}
        self._untold: dict[int, Told | None] = {}
        """Matched reports by number, with None for those whose files are on their way."""
        self._matched = 0
        self._excused: frozenset[int] = frozenset()
        """Ranks that collectives of ours need not wait for, because their machine is leaving."""
        self._cut_off: set[int] = set()
        """Ranks of whose words some may be missing."""
        self._gathered_without: dict[Key, Gathered] = {}
        """Collectives that were completed before everybody had come."""
        self.running: set[int] = set()
        self.returned: set[int] = set()
        self._steps = [0] * world_size
        self._moved_at = now
        self._validating = False
        self._present: dict[Stage, set[int]] = {}
        self.outcomes: deque[tuple[int, Outcome]] = deque()
        """Of calls that a backend's hooks made, with the rank that answers."""
        self.ready: list[Ready] = []
        self.told: deque[Told] = deque()
        self.given: deque[Given] = deque()
        """Names for files that we upload, as they are given."""
        self.given_up: set[str] = set()
        """Checkpoints some of whose files will not come: none is ever committed."""
        self.damaged: set[str] = set()
        """Committed checkpoints that a rank could not read."""
        self._latest: msgspec.Raw | None = None
        self._unsaved = (-1, "")
        """The last report whose files are saved or will never be, and then why not."""

    @property
    def settled(self) -> bool:
        """Whether no checkpoint is half saved or uncommitted, and nothing is left to tell."""
        return not self._saving and not self.ready and not self.told

    @property
    def metrics(self) -> dict[str, Any] | None:
        """Rank 0's metrics in the last report all ranks have made."""
        return None if self._latest is None else _metrics.decode(self._latest)

    @property
    def progress(self) -> Progress:
        """How far the ranks have come."""
        return Progress(
            tuple(self._steps),
            self._moved_at,
            self.running,
            self.returned,
            bool(self._saving),
            self._validating,
        )

    def validate(self, *, pending: bool, now: float) -> None:
        """Whether ranks may be waiting for a validation; that it has ended is a step of all."""
        if self._validating and not pending:
            self._moved_at = now
        self._validating = pending

    @property
    def uploading(self) -> frozenset[int]:
        """Ranks whose files the next checkpoint still waits for."""
        if not self._saving:
            return frozenset()
        first = self._saving[min(self._saving)]
        return frozenset(first.ranks) - first.done

    @property
    def saving(self) -> set[str]:
        """Names of the checkpoints whose files are on their way, or wait for their entry."""
        return {one.name for one in self._saving.values()} | {one.name for one in self.ready}

    @property
    def unsaved(self) -> str:
        """Why the last report with files is no checkpoint; '' where it is one, or may be yet."""
        return self._unsaved[1]

    @property
    def chosen(self) -> frozenset[str]:
        """All names that rank 0 chose, and what was given for them."""
        return frozenset(self._uses)

    @property
    def bases(self) -> set[str]:
        """Committed checkpoints whose files are shared by some that are on their way."""
        return {one.base for one in self._saving.values()} - {""}

    def all_present(self, stage: Stage) -> bool:
        """Whether every rank waits to begin that stage."""
        here = self.returned if stage == "leave" else self._present.get(stage, ())
        return len(here) == self.world_size

    def excuse(self, ranks: frozenset[int]) -> list[Answer]:
        """From now on reports, and our own collective, may be complete without these ranks.

        Nothing changes where rank 0 is one of them: names, metrics and values are its to give.
        """
        if 0 in ranks:
            return []
        self._excused = ranks
        answers = self._go_without_the_lost()
        gathers = [key for key in self._collectives.waiting if key.kind != REPORT]
        return answers + [told for key in gathers for told in self._complete(key)]

    def cut_off(self, ranks: Iterable[int]) -> list[Answer]:
        """The connection to these ranks broke, and with it may be lost what they said.

        What they report, gather or return from now on does not count: of the group's reports
        none shall be complete, and no checkpoint saved, that lacks what was lost.
        """
        self._cut_off.update(ranks)
        return self._go_without_the_lost()

    def take(self, rank: int, frame: msgspec.Raw, now: float) -> list[Answer]:
        """A frame of that rank; what it makes the hub say. Raises `msgspec.ValidationError`."""
        said = _frames.decode(frame)
        if not isinstance(said, Present | Outcome):
            self._steps[rank] += 1
            self._moved_at = now
        answers = self._take(rank, said, now)
        return answers + self._collectives.hopeless(self.returned, self._missing)

    def _take(self, rank: int, frame: FromWorker, now: float) -> list[Answer]:
        match frame:
            case Report() | Files() | Gather() | Returned() if rank in self._cut_off:
                return []
            case Report(n=n, metrics=metrics, dir_name=dir_name):
                return self._report(rank, n, metrics, dir_name, files=False)
            case Files(n=n, metrics=metrics, dir_name=dir_name) as asked:
                if n >= self._matched:
                    self._coming[n].note(rank, asked)
                    self._collectives.join(rank, Key(REPORT, n), now, blocks=asked.blocks)
                return self._report(rank, n, metrics, dir_name, files=True)
            case Saved(n=n) as saved:
                return self._save(rank, n, saved)
            case Unsaved(n=n, why=why):
                return self._unsave(n, f"rank {rank}: {why}")
            case Damaged(name=name):
                self.damaged.add(name)
            case Gather() as gather:
                return self._gather(rank, gather, now)
            case Present(stage=stage):
                self._present.setdefault(stage, set()).add(rank)
            case Outcome() as outcome:
                self.outcomes.append((rank, outcome))
            case Running():
                self.running.add(rank)
            case Returned():
                self.returned.add(rank)
                return self._match_all()
            case _:
                pass  # the others are for the agent beside the worker
        return []

    def late(self, now: float) -> list[Answer]:
        """What those who wait should know by now: who is missing, or that nobody comes any more."""
        return self._collectives.late(now, self._missing)

    def next_late(self) -> float | None:
        """When `late` should be asked again."""
        return self._collectives.next_late()

    # --- reports -----------------------------------------------------------------------------

    def _report(
        self, rank: int, n: int, metrics: msgspec.Raw, dir_name: str | None, *, files: bool
    ) -> list[Answer]:
        self._made[rank] = n + 1
        if n < self._matched:  # it was matched without this rank
            return [(rank, _nameless(n))] if files else []
        if rank == 0 or self._keep_all:
            self._keep(rank, n, metrics, dir_name)
        return self._match_all()

    def _keep(self, rank: int, n: int, metrics: msgspec.Raw, dir_name: str | None) -> None:
        kept = self._kept[rank]
        kept[n] = (msgspec.Raw(bytes(metrics)), dir_name)
        if len(kept) > BACKLOG:
            del kept[next(iter(kept))]

    def _match_all(self) -> list[Answer]:
        """Of all reports that are complete by now."""
        answers: list[Answer] = []
        while self._is_made(self._matched):
            answers += self._match(self._matched)
            self._matched += 1
        return answers

    @property
    def _lost(self) -> frozenset[int]:
        """Who leaves, and is gone already: nothing more comes of them."""
        return self._excused & self._cut_off

    def _go_without_the_lost(self) -> list[Answer]:
        """What they still had to save holds up no later save."""
        answers = self._match_all()
        for n, saving in sorted(self._saving.items()):
            if missing := sorted(self._lost.intersection(saving.ranks) - saving.done):
                answers += self._unsave(n, f"ranks {missing} left before their part was saved")
        return answers

    def _is_made(self, n: int) -> bool:
        """Whether everybody has made that report who must."""
        unneeded = self._unneeded(n)
        return all(made > n or rank in unneeded for rank, made in enumerate(self._made))

    def _unneeded(self, n: int) -> AbstractSet[int]:
        """Whom that report is complete without. A snapshot is nothing without all its parts:
        those who leave are waited for as long as they may still bring theirs."""
        if n in self._coming and self._coming[n].snapshot:
            return self._lost | (self._excused & self.returned)
        return self._excused

    def _match(self, n: int) -> list[Answer]:
        """All ranks have made their n-th report."""
        metrics, chosen = self._kept[0].get(n, (_NOTHING, None))
        ranks = tuple(sorted(self._collectives.close(Key(REPORT, n)).keys() - self._lost))
        coming = self._coming.pop(n, _Coming())
        telling = self._kept if self._keep_all else self._kept[:1]
        told = tuple(kept.pop(n, (_NOTHING, None))[0] for kept in telling)
        if not coming.snapshot or bytes(metrics) != b"{}":  # a snapshot need not say anything
            self._latest = metrics
        hopeless = coming.hopeless(ranks, self.world_size)
        self._untold[n] = Told(n, told, None) if hopeless or not ranks else None
        self._tell()
        if hopeless:
            self._unsaved = max(self._unsaved, (n, hopeless))
        if hopeless or not ranks:  # without a name nobody uploads anything
            return [answer for rank in ranks for answer in _refused(rank, n, hopeless)]
        name, base = self._use(chosen, n) if chosen else (self._name_for(n), "")
        if not coming.theirs:
            self.given.append(Given(name, made=name != chosen))
        if coming.snapshot:
            base = self._base_for()
        said = _metrics.decode(metrics)
        self._saving[n] = _Saving(name, ranks, said, told, coming, base, made_at=self._moved_at)
        return [(rank, Named(n, name, ranks, metrics, base)) for rank in ranks]

    def _use(self, chosen: str, n: int) -> tuple[str, str]:
        """A name nothing was ever saved under, and the checkpoint that was called so before.

        What was committed must stay whole until there is another, somebody may still be deleting
        what was dropped, and a straggler of an earlier round uploading what nobody waits for.
        """
        before = self._uses.get(chosen, self._last_called(chosen))
        name = chosen if before is None else f"{chosen}@{self.round}-{n}"
        self._uses[chosen] = self._uses[name] = name
        gone = before is not None and self._last_called(before) == ""
        return name, "" if gone else before or ""

    def _save(self, rank: int, n: int, saved: Saved) -> list[Answer]:
        saving = self._saving.get(n)
        if saving is None:
            return []
        if saving.done and saving.step != saved.step:
            return self._unsave(n, f"rank {rank} saved step {saved.step}, others {saving.step}")
        saving.note(rank, saved)
        self._tell_saved()
        return []

    def _unsave(self, n: int, why: str) -> list[Answer]:
        """It will never be complete: nobody waits for it any longer."""
        saving = self._saving.pop(n, None)
        if saving is None:
            if n >= self._matched:
                self._coming[n].never = why
            return []
        self._unsaved = max(self._unsaved, (n, why))
        self.given_up.add(saving.name)
        self._untold[n] = Told(n, saving.told, None)
        self._tell_saved()
        return [(rank, Uncarried(n, why)) for rank in saving.ranks]

    def _tell_saved(self) -> None:
        for n, saved in self._newly_saved():
            self.ready.append(saved.ready(self.round, n))
            self._unsaved = max(self._unsaved, (n, ""))
            self._untold[n] = Told(n, saved.told, saved.name)
        self._tell()

    def _tell(self) -> None:
        """In order, too: one that is still being saved holds up those behind it."""
        while self._untold:
            n, told = next(iter(self._untold.items()))
            if told is None:
                return
            self.told.append(told)
            del self._untold[n]

    def _newly_saved(self) -> Iterator[tuple[int, _Saving]]:
        """In the order of the reports: a later checkpoint never overtakes an earlier one."""
        for n in sorted(self._saving):
            if not self._saving[n].complete:
                return
            yield n, self._saving.pop(n)

    # --- collectives -------------------------------------------------------------------------

    def _gather(self, rank: int, gather: Gather, now: float) -> list[Answer]:
        key = Key(gather.kind, gather.seq)
        if (told := self._gathered_without.get(key)) is not None:
            return [(rank, told)]
        self._collectives.join(rank, key, now, value=gather.value, blocks=gather.blocks)
        return self._complete(key)

    def _complete(self, key: Key) -> list[Answer]:
        """The answers of a collective, if all have come who must."""
        if self._missing(key):
            return []
        values = self._collectives.close(key)
        told = Gathered(key.kind, key.seq, values[0])
        if len(values) < self.world_size:
            self._gathered_without[key] = told
        return [(member, told) for member in values]

    def _missing(self, key: Key) -> set[int]:
        """Who has to come to it, and has not."""
        everybody = set(range(self.world_size))
        if key.kind == REPORT:
            come = {rank for rank, made in enumerate(self._made) if made > key.seq}
            return everybody - come - self._unneeded(key.seq)
        excused = self._excused if _may_excuse(key.kind) else frozenset()
        return everybody - self._collectives.here(key) - excused


def _may_excuse(kind: str) -> bool:
    """The user's own collectives stay strict; ours may go on without those who leave."""
    return kind == "preemption_info"


def _refused(rank: int, n: int, why: str) -> list[Answer]:
    """What that rank brings with its n-th report nobody wants: others' parts are missing."""
    return [(rank, Uncarried(n, why)), (rank, _nameless(n))]


def _nameless(n: int) -> Named:
    return Named(n, "", (), _NOTHING)


class _Coming:
    """What ranks say of the files that they bring with a report."""

    def __init__(self) -> None:
        self.theirs = False
        """Whether somebody brings them by himself."""
        self.snapshot = False
        """Whether a Checkpointer saves: each rank has a part, and may share the latest one's."""
        self.why = ""
        """Why it is saved just then."""
        self.never = ""
        """Why some of them will not come."""
        self._wishes: dict[int, ValidationAsked | None] = {}

    def note(self, rank: int, asked: Files) -> None:
        """One of those who bring some."""
        self.theirs |= not asked.ours
        self.snapshot |= asked.shares
        self.why = asked.why or self.why
        self._wishes[rank] = asked.validation

    @property
    def validation(self) -> ValidationAsked | None:
        """What the first wants of those who bring files."""
        return self._wishes[min(self._wishes)]

    def hopeless(self, ranks: Sequence[int], world_size: int) -> str:
        """Why it will never be whole, if that is known already."""
        missing = sorted(set(range(world_size)).difference(ranks)) if self.snapshot else []
        left = f"ranks {missing} left without their part of the snapshot" if missing else ""
        return self.never or left


class _Saving:
    """A report of all ranks whose files are on their way."""

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        metrics: dict[str, Any],
        told: tuple[msgspec.Raw, ...],
        coming: _Coming,
        base: str,
        *,
        made_at: float,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.metrics = metrics
        self.told = told
        self.base = base
        self._asked = coming
        self._made_at = made_at
        """When the last rank had made its report."""
        self.done: set[int] = set()
        self.size_bytes = 0
        self.step: int | None = None
        self.at = ""
        """Where the first of them has put its files by himself: whoever reads it looks there."""

    @property
    def complete(self) -> bool:
        return self.done.issuperset(self.ranks)

    def note(self, rank: int, saved: Saved) -> None:
        """That rank's part is there."""
        self.done.add(rank)
        self.size_bytes += saved.size_bytes
        self.step = saved.step
        if rank == self.ranks[0]:
            self.at = saved.at

    def ready(self, round_number: int, n: int) -> Ready:
        return Ready(
            self.name,
            round_number,
            n,
            self.metrics,
            self.ranks,
            self.size_bytes,
            self._asked.validation,
            self._asked.snapshot,
            self.step,
            self._asked.why,
            self.at,
            self._made_at if self._asked.snapshot else None,
        )
