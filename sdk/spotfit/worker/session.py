"""Session: a worker's side of its round. Reports out, names and collectives in."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from spotfit.checkpoint.handle import Checkpoint, path_of
from spotfit.checkpoint.manifest import Manifest
from spotfit.checkpoint.restore import open_all, open_committed, open_so_far
from spotfit.checkpoint.save import record
from spotfit.core.clock import Clock
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import CollectiveTimeoutError, ConfigError, SessionMisuseError
from spotfit.core.units import told_bytes, told_seconds
from spotfit.host import log
from spotfit.host.clocks import SystemClock, wall_ms
from spotfit.ledger.journal import Journal
from spotfit.model.data import unknown_dataset
from spotfit.model.events import CheckpointCommitted
from spotfit.model.metrics import metrics_from_json, metrics_to_json
from spotfit.model.preemption import PreemptionInfo
from spotfit.model.reporting import CheckpointConsistencyMode, CheckpointUploadMode
from spotfit.model.spec import Keep, RunSpec
from spotfit.model.view import View
from spotfit.model.wire import (
    Call,
    Carried,
    Carry,
    Committed,
    Files,
    Gather,
    Gathered,
    Judged,
    Named,
    Overdue,
    Preempted,
    Proceed,
    Saved,
    SaveSoon,
    Start,
    ToWorker,
    Uncarried,
)
from spotfit.policy.drain import UNKNOWN_NOTICE_S
from spotfit.policy.retention import expendable, worst_to_best
from spotfit.ship.function import pickled, unpickled
from spotfit.store.api import Store
from spotfit.worker import crash
from spotfit.worker.calls import Calls
from spotfit.worker.context import TrainContext
from spotfit.worker.inbox import Inbox
from spotfit.worker.parcel import Parcel, bring, delete_local, uploaded_by
from spotfit.worker.reported import Luggage, ReportedCheckpoint
from spotfit.worker.snapshots import Snapshots
from spotfit.worker.talk import Talk
from spotfit.worker.uploads import Uploads

WARN_S = 60.0
_IN_STEP = "Every rank has to make the same calls in the same order; look at their logs."
BIG_BROADCAST_BYTES = 1024
_LARGEST_BROADCAST_BYTES = 4 * 2**20
_DRAIN_EVERY = 256

Found = TypeVar("Found")
_metrics = decoder(dict[str, Any])
_preempted: msgspec.json.Decoder[Preempted | None] = msgspec.json.Decoder(Preempted | None)
_specs = decoder(RunSpec)


class Session:
    """One worker's part in one round.

    `store` is rooted at the run, `devices` are the worker's own accelerators. A failing background
    upload is told to `fail`, which ends the process at once: the function may be anywhere.
    """

    def __init__(
        self,
        start: Start,
        talk: Talk,
        store: Store,
        *,
        devices: tuple[str, ...] = (),
        clock: Clock | None = None,
        fail: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.context = TrainContext(start, store)
        self.devices = devices
        self._start = start
        self._talk = talk
        self._store = store
        self._clock = clock or SystemClock()
        self._uploads = Uploads(fail or self._end_at_once)
        self.reports = 0
        """How many reports this worker has made."""
        self._seqs: Counter[str] = Counter()
        self._inbox = Inbox(talk, self._take, self._clock)
        self.calls = Calls(talk, self._inbox, hooks=start.hooks)
        """What a backend's hooks ask of this worker."""
        self.snapshots = Snapshots(self, start, talk, store)
        """What a Checkpointer hands over."""
        self._named: dict[int, Named] = {}
        self._gathered: dict[tuple[str, int], Gathered] = {}
        self._committed: set[str] = set()
        self._judged = 0
        """How many validations have ended since this round was opened."""
        self._brought: dict[int, str] = {}
        """By report, the checkpoints that this worker has files in."""
        self._uncarried: set[int] = set()
        """Reports that are no checkpoint, because others' files are lost."""
        self._given_away: set[int] = set()
        """Reports whose files the agent has brought to the bucket for us, but not told of yet."""
        self._latest: tuple[int, str, str] | None = None
        """Of what this worker reported last, and is uploaded: which report, the checkpoint's name,
        and its folder."""
        self._preempted: Preempted | None = None
        self._advice: tuple[float, str] | None = None

    @property
    def host(self) -> str:
        """The address of this node, as other nodes reach it."""
        return self._start.host

    @property
    def resizes(self) -> bool:
        """Whether the group may go on with another number of workers."""
        return self._spec.workers_min < self._spec.workers_max

    # --- reports -----------------------------------------------------------------------------

    def report_metrics(self, metrics: dict[str, Any], dir_name: str | None = None) -> None:
        """Send the next report, and go on: this is the path that must cost nothing."""
        body = metrics_to_json(metrics)
        n = self.next_report()
        self._talk.send_report(n, body, dir_name)
        if n % _DRAIN_EVERY == 0:
            self.drain()

    def report_files(self, metrics: dict[str, Any], luggage: Luggage) -> None:
        """Agree on the directory's name with all ranks, then upload, or have it uploaded."""
        self._check(luggage)
        n = self._send_files(metrics, luggage)
        named = self.wait_for(partial(self._name_of, n))
        if isinstance(named, Gathered):
            raise self._never(named)
        assert isinstance(named, Named)  # there was no time limit
        if not named.name:
            log.warning("report.without_us", rank=self._start.rank, n=n)
            return
        self._brought[n] = named.name
        parcel = self._parcel(named, luggage)
        in_background = luggage.mode is CheckpointUploadMode.ASYNC
        if parcel.base or not in_background:
            self.close()
        if not in_background:
            self._save(parcel, luggage)
        elif luggage.upload_fn is None:
            self._give_away(parcel)
        else:  # it may know what lives in this process only
            self._uploads.put(partial(self._save, parcel, luggage))

    def _name_of(self, n: int) -> Named | Gathered | None:
        return self._named.pop(n, None) or self._gathered.pop(("report", n), None)

    def next_report(self) -> int:
        """The number of a report that is about to be made."""
        n, self.reports = self.reports, self.reports + 1
        return n

    def close(self) -> None:
        """Wait for the uploads that are under way."""
        self._uploads.wait()
        self.wait_for(lambda: None if self._given_away else True, what="its uploads")
        self.snapshots.close()

    # --- checkpoints -------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint | None:
        """What this worker reported last, once it is uploaded, with what others have brought by
        then; else what the round began from."""
        self.drain()
        if self._latest is None:
            return self._restored
        _, name, folder = self._latest
        return open_so_far(self._store, name, folder)

    def dataset(self, name: str | None) -> Any:
        """Workers are not fed yet: there is none of any name."""
        raise unknown_dataset(name, ())

    def reported(
        self, mode: CheckpointConsistencyMode, timeout_s: float | None
    ) -> list[ReportedCheckpoint]:
        """What the journal holds once all this worker brought is in it, or the time is over.

        For `VALIDATED` nothing may be left to validate, either.
        """
        give_up_at = None if timeout_s is None else self._clock.now() + timeout_s
        self.wait_for(
            lambda: True if self._awaited <= self._committed else None,
            what="its checkpoints to be committed",
            timeout_s=timeout_s,
        )
        view = self._journal.catch_up()
        if mode is CheckpointConsistencyMode.VALIDATED:
            view = self._validated(view, give_up_at)
        kept = _staying(view, self._spec.keep)
        checkpoints = open_all(self._store, {one.name for one in kept})
        return [
            ReportedCheckpoint(
                checkpoints[one.name], metrics_from_json(one.metrics), view.status_of(one)
            )
            for one in kept
        ]

    @property
    def _awaited(self) -> set[str]:
        """What this worker brought that is, or will be, a checkpoint."""
        return {name for n, name in self._brought.items() if n not in self._uncarried}

    def _validated(self, view: View, give_up_at: float | None) -> View:
        """The run once it has nothing to validate, or as it is when the time is over."""
        while view.unvalidated and self._spec.validation is not None:
            heard = self._judged
            left_s = None if give_up_at is None else give_up_at - self._clock.now()
            more = self.wait_for(
                partial(self._more_judged, heard),
                what=f"{len(view.unvalidated)} checkpoints to be validated",
                timeout_s=left_s,
            )
            view = self._journal.catch_up()
            if more is None:
                break
        return view

    def _more_judged(self, than: int) -> bool | None:
        return True if self._judged > than else None

    # --- collectives -------------------------------------------------------------------------

    def gather(self, kind: str, value: bytes = b"", timeout_s: float | None = None) -> bytes:
        """Rank 0's value, once all ranks have come.

        Raises `CollectiveTimeoutError` where they do not come in time, and `SessionMisuseError`
        where they never will.
        """
        seq = self._seqs[kind]
        self._seqs[kind] += 1
        self._talk.send(Gather(kind, seq, value, blocks=_in_main_thread()))
        told = self.wait_for(partial(self._gathered.pop, (kind, seq), None), timeout_s=timeout_s)
        if told is None:
            raise CollectiveTimeoutError(
                f"{kind} timed out after {timeout_s} s on rank {self._start.rank}.", do=_IN_STEP
            )
        if told.missing or told.why:
            raise self._never(told)
        return told.value

    def _never(self, told: Gathered) -> CollectiveTimeoutError | SessionMisuseError:
        """A collective that was given up."""
        missing = ", ".join(str(rank) for rank in told.missing)
        if told.why:
            return SessionMisuseError(
                f"{told.kind} on rank {self._start.rank} can never be complete: {told.why}.",
                do=_IN_STEP,
            )
        limit_s = self._start.collective_timeout_s
        return CollectiveTimeoutError(
            f"{told.kind} timed out after {limit_s} s: these ranks have not joined: [{missing}].",
            do=f"{_IN_STEP} SPOTFIT_COLLECTIVE_TIMEOUT_S says how long to wait.",
            missing=told.missing,
        )

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather("barrier")

    def broadcast(self, thing: Any) -> Any:
        """What rank 0 gave."""
        mine = self._packed(thing) if self._start.rank == 0 else b""
        if len(mine) > _LARGEST_BROADCAST_BYTES:
            raise ConfigError(
                f"broadcast_from_rank_zero was given {told_bytes(len(mine))}; it takes "
                f"{told_bytes(_LARGEST_BROADCAST_BYTES)} at most.",
                do="Broadcast tensors with torch.distributed, and files through a checkpoint.",
            )
        told = self.gather("broadcast_from_rank_zero", mine)
        return unpickled(told, what="broadcast")

    def drain(self) -> None:
        """Take what the agent has told: it must not pile up for one who only ever reports."""
        self._inbox.drain()

    def notice(self) -> float | None:
        """In how many seconds the first machine of the group goes, by its own word, as far as this
        rank knows; None where none is known to."""
        self.drain()
        if self._preempted is None:
            return None
        if not self._preempted.deadline_ms:
            return UNKNOWN_NOTICE_S
        return (self._preempted.deadline_ms - wall_ms()) / 1000

    def replaced(self) -> bool:
        """Whether whoever leaves the group could be done without at once, as far as it is known."""
        self.drain()
        return self._preempted is not None and self._preempted.replaced

    def all_leave(self) -> bool:
        """Whether all machines of the group have announced their end, as far as it is known."""
        self.drain()
        going = self._preempted.nodes.values() if self._preempted else ()
        return sum(map(len, going)) == self._start.world_size

    def advice(self) -> tuple[float, str] | None:
        """When, by this machine's own clock, a cloud last said that a machine of the group is in
        danger, and how; None as long as none has."""
        self.drain()
        return self._advice

    def wait_for_notice(self, within_s: float) -> bool:
        """Whether it comes to know, in so long, that a machine of its group will be taken away."""
        return self._inbox.wait(lambda: self._preempted, within_s) is not None

    def preemption_info(self) -> PreemptionInfo | None:
        """Rank 0's knowledge, so that all ranks decide alike."""
        self.drain()
        told = _preempted.decode(self.gather("preemption_info", encode(self._preempted)))
        if told is None:
            return None
        nodes = {node: list(ranks) for node, ranks in told.nodes.items()}
        return PreemptionInfo(told.deadline_ms or None, nodes)

    # --- saving ------------------------------------------------------------------------------

    def _send_files(self, metrics: dict[str, Any], luggage: Luggage) -> int:
        name = luggage.dir_name
        if name is None and luggage.mode is CheckpointUploadMode.NO_UPLOAD:
            folder = self._folder_of(luggage.checkpoint)
            name = folder if "/" not in folder else None
        body = msgspec.Raw(metrics_to_json(metrics))
        n = self.next_report()
        ours = luggage.upload_fn is None and luggage.mode is not CheckpointUploadMode.NO_UPLOAD
        blocks, wish = _in_main_thread(), luggage.validation
        self._talk.send(Files(n, body, name, blocks, wish, ours))
        return n

    def _parcel(self, named: Named, luggage: Luggage) -> Parcel:
        part = Manifest(
            named.name,
            self._start.round,
            named.n,
            self._start.rank,
            named.ranks,
            _metrics.decode(named.metrics),
            (),
            validation=luggage.validation,
        )
        return Parcel(luggage.checkpoint, part, named.base, luggage.delete)

    def _give_away(self, parcel: Parcel) -> None:
        """To the agent, which brings it even if this process dies."""
        self._given_away.add(parcel.part.report)
        self._talk.send(Carry(parcel.part.report, parcel.part.name, parcel.packed()))

    def _save(self, parcel: Parcel, luggage: Luggage) -> None:
        manifest = self._brought_by(parcel, luggage)
        self._note_saved(manifest.report, manifest.name, manifest.folder)
        told = Saved(manifest.report, manifest.name, manifest.size_bytes, at=manifest.at)
        self._talk.send(told)
        if parcel.delete:
            delete_local(parcel.checkpoint, self._store)

    def _brought_by(self, parcel: Parcel, luggage: Luggage) -> Manifest:
        if luggage.mode is CheckpointUploadMode.NO_UPLOAD:
            return self._recorded(parcel, parcel.checkpoint)
        if luggage.upload_fn is None:
            return bring(parcel, self._store)
        there = uploaded_by(luggage.upload_fn, parcel.checkpoint, parcel.part.name)
        return self._recorded(parcel, there)

    def _recorded(self, parcel: Parcel, there: Any) -> Manifest:
        part = msgspec.structs.replace(parcel.part, at=self._folder_of(there))
        return record(self._store, part, base=parcel.base)

    def _note_saved(self, n: int, name: str, folder: str) -> None:
        """Two uploads of different kinds may end in another order than they were reported."""
        if self._latest is None or n > self._latest[0]:
            self._latest = n, name, folder

    def _folder_of(self, checkpoint: Any) -> str:
        """Where a checkpoint that nobody has to upload lies in the run's folder."""
        if not isinstance(checkpoint, Checkpoint):
            raise ConfigError(
                f"checkpoint_upload_fn must return a Checkpoint, not a "
                f"{type(checkpoint).__name__}.",
                do="Return Checkpoint(path) of the place it was uploaded to.",
            )
        folder = checkpoint.folder_below(self._store)
        if folder is None or folder.startswith("."):
            raise ConfigError(
                f"The checkpoint at {checkpoint.path} lies outside the experiment directory "
                f"{path_of(self._store)}.",
                do="Put it below get_context().get_storage().experiment_fs_path.",
            )
        return folder

    def _check(self, luggage: Luggage) -> None:
        if luggage.validation is not None and self._spec.validation is None:
            raise ConfigError(
                "A validation was asked for, but the trainer was given no validation_config.",
                do="Give the trainer a validation_config, or leave validation out.",
            )
        if luggage.mode is CheckpointUploadMode.NO_UPLOAD:
            self._folder_of(luggage.checkpoint)
        local = luggage.checkpoint.local_directory
        if luggage.delete and local and Path(path_of(self._store)).is_relative_to(local):
            raise ConfigError(
                f"The checkpoint directory {local} contains the experiment directory, and it would "
                "be deleted after the upload.",
                do="Save checkpoints into a directory of their own.",
            )

    # --- listening ---------------------------------------------------------------------------

    def wait_for(
        self,
        ready: Callable[[], Found | None],
        *,
        what: str | None = None,
        timeout_s: float | None = None,
    ) -> Found | None:
        """What `ready` gives once it gives something; None when the time is over before.

        Of what takes long it tells now and then, by the name of `what`.
        """
        began = self._clock.now()
        while True:
            waited_s = self._clock.now() - began
            left_s = math.inf if timeout_s is None else timeout_s - waited_s
            found = self._inbox.wait(ready, min(WARN_S, left_s))
            if found is not None or left_s <= 0:
                return found
            if what is not None and left_s >= WARN_S:
                log.warning("worker.waits", rank=self._start.rank, what=what, so_far_s=waited_s)

    def _take(self, frame: ToWorker) -> None:
        if self.snapshots.take(frame):
            return
        match frame:
            case Named():
                self._named[frame.n] = frame
            case Gathered():
                self._gathered[frame.kind, frame.seq] = frame
            case Committed():
                self._committed.add(frame.name)
            case Carried():
                self._given_away.discard(frame.n)
                self._note_saved(frame.n, frame.name, frame.name)
            case Uncarried(n=n, why=why):
                self._uncarried.add(n)
                log.warning("checkpoint.lost", rank=self._start.rank, n=n, why=why)
            case Judged():
                self._judged += 1
            case Preempted():
                self._preempted = frame
            case SaveSoon(reason=reason):
                self._advice = (self._clock.now(), reason)
            case Overdue(kind=kind, missing=missing, waited_s=waited_s):
                ranks = ", ".join(str(rank) for rank in missing)
                so_far = told_seconds(waited_s)
                log.warning("collective.waits", what=kind, missing_ranks=ranks, so_far=so_far)
            case Call() | Proceed():
                self.calls.take(frame)
            case Start():
                raise AssertionError("a worker lives for one round")

    def _packed(self, thing: Any) -> bytes:
        body = pickled(thing, told_as={"broadcast": thing}, by_value_modules=()).body
        if len(body) > BIG_BROADCAST_BYTES:
            log.warning(
                "worker.broadcast", size=told_bytes(len(body)), why="meant for small things"
            )
        return body

    def _end_at_once(self, error: BaseException) -> None:
        self._talk.send(crash.as_raised(error))
        os._exit(1)

    @cached_property
    def _restored(self) -> Checkpoint | None:
        name = self._start.checkpoint
        return None if name is None else open_committed(self._store, name)

    @cached_property
    def _journal(self) -> Journal:
        return Journal(self._store)

    @cached_property
    def _spec(self) -> RunSpec:
        return _specs.decode(self._start.spec)


def _staying(view: View, keep: Keep) -> list[CheckpointCommitted]:
    """Worst to best, without those that nobody needs any more: they are dropped in a moment."""
    pending = {one.name for one in view.unvalidated}
    going = {one.name for one in expendable(view.checkpoints, keep, protected=pending)}
    return [one for one in worst_to_best(view.checkpoints, keep) if one.name not in going]


def _in_main_thread() -> bool:
    """Where the training function runs."""
    return threading.current_thread() is threading.main_thread()
