"""Checkpointer: the whole state of a training, saved without stopping it, and gone on from."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakSet

from spotfit.checkpoint.handle import Checkpoint
from spotfit.core.errors import ConfigError
from spotfit.host import log
from spotfit.host.clocks import SystemClock
from spotfit.model.cadence import MAX_OVERHEAD, Cadence, parse_cadence
from spotfit.model.metrics import metrics_to_json
from spotfit.torch.group import broadcast, check_group, gathered
from spotfit.torch.restoring import Restoring
from spotfit.worker.context import TrainContext
from spotfit.worker.current import current
from spotfit.worker.handover import IN_MEMORY, Handover
from spotfit.worker.pace import Pace
from spotfit.worker.recall import Recall

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from spotfit.checkpoint.saved import Saved
    from spotfit.frameworks.torch.arena import Arena
    from spotfit.frameworks.torch.given import Given
    from spotfit.frameworks.torch.position import Passes, Position
    from spotfit.frameworks.torch.shares import Share
    from spotfit.frameworks.torch.state import Training

_PLAIN_BYTES = 2**17
SLOTS = 2
"""So many snapshots of a rank may be on their way; a third waits for the first."""
_ON_THEIR_WAY = ("given", "carried")
_LOOK_S = 0.01
_TOLD_WAIT_S = 0.1
"""Who saves after every step waits for a moment each time: that is nothing to tell."""

P = ParamSpec("P")
R = TypeVar("R")


def _for_good(call: Callable[P, R]) -> Callable[P, R]:
    """Every other try would meet its ConfigErrors, too: the run is not to spend any on them."""

    @wraps(call)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except ConfigError as refused:
            refused.facts.setdefault("may_pass", False)
            raise

    return told


class Restored(NamedTuple):
    """What a training goes on from."""

    checkpoint: str
    """Its name; "" for a state in memory, which is none yet."""
    step: int
    """So many steps were done."""
    epoch: int
    """The epoch to go on with; the loader begins where that was left."""
    source: str
    """Where it was read from: 'memory' or 'bucket'."""


class Checkpointer:
    """Keeps model, optimizer and all else a training goes on from, without stopping it.

    Every rank makes one, calls `restore` before its loop and `step` after each batch. A snapshot is
    copied to memory that the node's agent shares, and the agent brings it to the bucket, even if
    this process dies. Each rank saves its own shards, and its share of what all ranks hold alike;
    any number of ranks can go on from it.

    A snapshot that is committed is a checkpoint like any other: `Result.checkpoint`,
    `get_checkpoint()` and `CheckpointConfig` know it.
    """

    @_for_good
    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: DataLoader[Any] | None = None,
        every: Any = "auto",
        max_overhead: float = MAX_OVERHEAD,
        extra: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        """`scheduler`, `scaler`, and what `extra` and `own` name, have `state_dict` and
        `load_state_dict`. What is in `extra` is the same on all ranks; what is in `own` is each
        rank's own, such as its place in a stream, and ties the training to its number of workers:
        a group that may shrink or grow is refused it.

        `loader` is this rank's: its place in the epoch is kept, too. `every` says when to save:
        "auto", a time like "10m", a number of steps, "epoch", "at_notice", or a list of them.
        "auto" weighs what a save costs against what may be lost, and spends `max_overhead` of the
        time at most. Raises `ConfigError`.
        """
        session = current("spotfit.torch.Checkpointer")
        cadence = parse_cadence(every, max_overhead=max_overhead)
        from spotfit.frameworks.torch.arena import Arena
        from spotfit.frameworks.torch.given import Given
        from spotfit.frameworks.torch.shares import Shares

        self._desk = session.snapshots
        _refuse_second(self._desk)
        self._rank = session.context.get_world_rank()
        self._world_size = session.context.get_world_size()
        self._clock = SystemClock()
        check_group(self._world_size)
        given = Given(model, optimizer, scheduler, scaler, loader, extra, own)
        given.check()
        self._own = dict(own or {})
        self._training = _training_of(given)
        # Who does not come is told of: torch would only wait, and long.
        self._desk.agreed("Checkpointer", b"")
        self._place = _place_in(loader, cadence, session.context)
        if self._desk.resizes:
            _refuse_tied(self._own, self._place)
        self._recall = Recall(
            self._desk,
            session.context,
            gather=gathered,
            broadcast=broadcast,
            clock=self._clock,
        )
        self._shares = Shares(self._rank, gathered)
        self._size_bytes = 0
        """What this rank's last snapshot took, or its first one will."""
        self._pace = self._paced(cadence)
        self._slots = [_Slot(Arena(self._desk.folders, self._desk.path_for)) for _ in range(SLOTS)]
        self._preparing: threading.Thread | None = None
        self._saves = 0
        """How many were begun since the round began, by this rank and all others."""
        self._asked = False
        """Whether a save was asked for."""
        self._epoch_ended = False
        """Whether it has since the optimizer's last step: its last batch may only add gradients."""
        self._gradients_wait = False
        """Whether the last batch's are still to be added to the next one's."""
        self.steps = 0
        """Steps the training has done, those before a restart too."""
        _served.add(self._desk)

    def _paced(self, cadence: Cadence) -> Pace:
        return Pace(
            cadence,
            agreed=self._desk.agreed,
            leads=self._rank == 0,
            clock=self._clock,
            odds=self._desk.odds,
            notice=self._desk.notice,
            replaced=self._desk.replaced,
            peer_bytes_per_s=self._desk.peer_bytes_per_s,
            advice=self._desk.advice,
            slots=SLOTS,
        )

    # --- saving ------------------------------------------------------------------------------

    def step(self, metrics: dict[str, Any] | None = None, *, accumulating: bool = False) -> None:
        """One more batch is trained on, by every rank. Saves where that is due.

        `metrics` come with the checkpoint: rank 0's are kept, and the score of `CheckpointConfig`
        is looked up in them. They are no report by themselves. After a batch whose gradients wait
        to be added to the next one's say `accumulating=True`, on every rank: gradients are not
        saved, so nothing is until the optimizer has taken them. Raises `ConfigError` for metrics
        that cannot be told.
        """
        self._refuse_undrawn()
        self.steps += 1
        if self._place is not None:
            self._epoch_ended |= self._place.advance()
        self._gradients_wait = accumulating
        if accumulating:
            return
        ends_epoch, self._epoch_ended = self._epoch_ended, False
        self._note_fates()
        why = self._pace.due(self.steps, ends_epoch=ends_epoch)
        if why is not None:
            self._save(metrics or {}, why)
            return
        if self._preparing is None:
            self._prepare()
        metrics_to_json(metrics or {})  # it shall not show at the first save only

    def save(self, metrics: dict[str, Any] | None = None) -> None:
        """Save now, on every rank, whatever `every` says.

        Gradients that wait to be added to the next batch's are not kept, and the log says so.
        Raises `ConfigError` for metrics that cannot be told; then nothing is saved.
        """
        if not self._asked:  # once: where one rank asks it mostly does so the first time
            self._desk.agreed("Checkpointer.save", b"")
            self._asked = True
        self._refuse_undrawn()
        if self._gradients_wait and self._rank == 0:
            log.warning(
                "checkpoint.gradients_wait",
                step=self.steps,
                why="the last step() was told accumulating=True: gradients are not saved",
                do="have the optimizer take them first, or save after a step() without it",
            )
        self._save(metrics or {}, "asked for")

    def _refuse_undrawn(self) -> None:
        from spotfit.frameworks.torch.undrawn import refuse_to_train

        refuse_to_train(self._desk)

    def _prepare(self) -> None:
        """Deal the state out, and take memory for it meanwhile: the first save shall find both.

        Raises `ConfigError` for what cannot be kept: it shall not show at the first save only.
        """
        share, slots = self._share(), self._slots  # no thread keeps a Checkpointer alive
        values_bytes = sum(map(len, self._plain(share)))
        self._size_bytes = share.size_bytes + values_bytes
        pieces, plain_bytes = share.pieces, max(_PLAIN_BYTES, values_bytes)

        def fit() -> None:
            for slot in slots:
                with suppress(OSError):  # the save tells
                    slot.arena.fit(pieces, plain_bytes=plain_bytes)

        self._preparing = threading.Thread(target=fit, name="spotfit-arena", daemon=True)
        self._preparing.start()

    def _save(self, metrics: dict[str, Any], why: str) -> None:
        if self._preparing is not None:
            self._preparing.join()
        self._saves += 1
        self._pace.saved(self.steps)
        slot = self._free_slot()
        began = self._clock.now()
        try:
            self._take(slot.arena)
            metrics_to_json(metrics)
        except ConfigError as unfit:
            self._desk.withhold({}, unfit.what)  # the other ranks' parts wait for ours
            raise
        except OSError as full:
            self._desk.withhold(metrics, f"There is no room for a snapshot: {full}")
            return
        slot.report = self._desk.give(metrics, slot.arena.path, why)
        stall_s = self._clock.now() - began
        most_bytes = max(self._shares.largest_bytes, self._size_bytes)
        self._pace.given(slot.report, stall_s, most_bytes)
        if self._rank == 0:
            log.info("checkpoint.snapshot", step=self.steps, stall_s=round(stall_s, 4), why=why)

    def _share(self) -> Share:
        state = self._training.state()
        drifting = self._training.drifting(state)
        return self._shares.of(state, drifting=drifting, last_bytes=self._size_bytes)

    def _take(self, arena: Arena) -> None:
        from spotfit.checkpoint.snapshot import Index, chunks_of

        share = self._share()
        values, own = self._plain(share)
        index = Index(
            rank=self._rank,
            world_size=self._world_size,
            step=self.steps,
            pieces=share.pieces,
            leaves=share.leaves,
            plain=values,
            own=own,
            epoch=self._place.epoch if self._place else 0,
            consumed=self._place.consumed if self._place else 0,
            chunks=chunks_of(share.pieces),
            save=self._saves,
        )
        self._size_bytes = share.size_bytes + len(values) + len(own)
        arena.fit(share.pieces, plain_bytes=len(values) + len(own))
        arena.take(share.tensors)
        arena.finish(index)

    def _plain(self, share: Share) -> tuple[bytes, bytes]:
        """What is no tensor, and what is this rank's alone. Raises `ConfigError`."""
        from spotfit.frameworks.torch.shares import plain
        from spotfit.frameworks.torch.state import dice

        values = plain(share.values, of=share.leaves)
        return values, plain({"dice": dice(), **self._own_state()})

    def _own_state(self) -> dict[str, Any]:
        """What is this rank's alone, beside its dice."""
        found = self._place.state() if self._place is not None else {}
        if self._own:
            found["own"] = {name: one.state_dict() for name, one in self._own.items()}
        return found

    def _free_slot(self) -> _Slot:
        """The one whose snapshot is the oldest: the last one stays whole while another is taken.

        Waits where the agent has not brought it to the bucket yet.
        """
        oldest = min(self._slots, key=lambda slot: -1 if slot.report is None else slot.report)
        if oldest.report is None or self._desk.fate(oldest.report) != "given":
            return oldest
        began = self._clock.now()
        self._desk.wait(oldest.report)
        waited_s = self._clock.now() - began
        if waited_s >= _TOLD_WAIT_S:
            log.warning(
                "checkpoint.waited",
                rank=self._rank,
                step=self.steps,
                waited_s=round(waited_s, 3),
                why=f"{SLOTS} snapshots were on their way to the bucket",
            )
        return oldest

    def _note_fates(self) -> None:
        if self._rank == 0:
            for slot in self._slots:
                if slot.report is not None:
                    self._pace.measured.note(slot.report, self._desk.fate(slot.report))

    # --- restoring ---------------------------------------------------------------------------

    @_for_good
    def restore(self) -> Restored | None:
        """Go on from the newest state that is whole; None where the run has none.

        That is the last snapshot, where it still lies in the machines' memory, else the latest
        checkpoint; after saves of this very function the latest that is committed, to take steps
        back that went wrong. All ranks have to call it, before their loops or between two steps.
        One that is damaged is told of, and an earlier one taken. Raises `IntegrityError` where no
        checkpoint is left that can be read, and `ConfigError` where model or optimizer are not
        those that were saved, or an object does not take its state back. The former changes
        nothing, unless the state in memory was found torn while it was read, and the checkpoint
        that was to replace it is refused.
        """
        from spotfit.frameworks.torch import undrawn

        self._desk.agreed("Checkpointer.restore", b"")
        if self._saves:
            self._forget_saves()
        restoring = self._restoring()
        try:
            saved = self._recall.newest(
                restoring.planned, restoring.judge, saved_since=self._saves > 0
            )
        except BaseException:  # the user's state_dict may raise anything
            restoring.undo()
            raise
        if saved is None:
            restoring.undo()
            undrawn.refuse_to_begin(self._desk)
            return None
        epoch = restoring.adopt(saved)
        undrawn.brought(self._desk, self._training.others)
        return self._restored(saved, epoch)

    def _restoring(self) -> Restoring:
        return Restoring(
            self._training,
            self._own,
            self._place,
            rank=self._rank,
            world_size=self._world_size,
            surely=self._desk.has_snapshots,
        )

    def _forget_saves(self) -> None:
        """What is on its way comes to its end, and memory keeps nothing that is newer: a later
        life would go on from that, and not from the checkpoint that is taken now."""
        if self._preparing is not None:
            self._preparing.join()
        for slot in self._slots:
            while slot.report is not None and self._desk.fate(slot.report) in _ON_THEIR_WAY:
                self._clock.wait(_LOOK_S)
        self._note_fates()
        for slot in self._slots:
            slot.report = None
            slot.arena.close()
        self._desk.take_back()
        self._preparing = None

    def _restored(self, saved: Saved, epoch: int) -> Restored:
        self.steps = saved.indices[0].step
        self._epoch_ended = self._gradients_wait = False
        self._pace.begin(self.steps)
        name, source = ("", "memory") if saved.name == IN_MEMORY else (saved.name, "bucket")
        if self._rank == 0:
            log.info("checkpoint.restored", name=saved.name, step=self.steps, source=source)
        return Restored(name, self.steps, epoch, source)


def export_checkpoint(
    checkpoint: Checkpoint, path: str | os.PathLike[str], *, everything: bool = False
) -> None:
    """Put the shards of a Checkpointer's checkpoint together in one file, readable without spotfit.

    The ending says how: `.safetensors`, or `.pt` for torch.save, which can hold `everything`: the
    optimizer and all else, too. Raises `ConfigError`, and `IntegrityError` for damage.
    """
    from spotfit.client.kept import write  # nothing that a worker needs

    write(checkpoint.snapshot(), Path(path), everything=everything)


class _Slot:
    """A snapshot's place in memory, and the report it went with last."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.report: int | None = None


_served: WeakSet[Handover] = WeakSet()
"""Those that have a Checkpointer, or had one."""


def _refuse_second(desk: Handover) -> None:
    """A run has one series of checkpoints: another's would be taken for it at the restore."""
    if desk in _served:
        raise ConfigError(
            "This training has a Checkpointer already, and with two of them each would restore "
            "what the other one saved.",
            do="Make one, before the loop, of all that is trained: one model of all, such as a "
            "torch.nn.ModuleDict, and a list of their optimizers. Trainings that follow each "
            "other, such as those of several folds, are runs of their own.",
        )


def _refuse_tied(own: Mapping[str, Any], place: Position | Passes | None) -> None:
    """What only as many ranks can go on from would end the run when its group shrinks or grows."""
    tied = [f"own={{…}} ({', '.join(sorted(own))})"] if own else []
    if place is not None and place.tied:
        tied.append("the place of loader=")
    if tied:
        raise ConfigError(
            f"{' and '.join(tied)} is each rank's own, so only as many can go on from it, and "
            "num_workers=(min, max) lets the group shrink and grow.",
            do="Give num_workers as one number, or keep in extra={…} what all ranks share, and "
            "share one dataset out with prepare_data_loader or a DistributedSampler.",
        )


def _training_of(given: Given) -> Training:
    from spotfit.frameworks.torch.state import Training

    others = {"scheduler": given.scheduler, "scaler": given.scaler, **(given.extra or {})}
    return Training(
        given.model,
        given.optimizers,
        {name: one for name, one in others.items() if one is not None},
    )


def _place_in(
    loader: DataLoader[Any] | None, cadence: Cadence, context: TrainContext
) -> Position | Passes | None:
    """Where this rank stands in its data; None without a loader."""
    from spotfit.frameworks.torch.position import place_in

    place = None
    if loader is not None:
        place = place_in(loader, world_size=context.get_world_size())
        place.watch.tells = context.get_world_rank() == 0
        place.watch.awaits_ends = cadence.epochs
    if not cadence.epochs:
        return place
    lengths = gathered(place.batches if place is not None else None)
    if None in lengths:
        raise ConfigError(
            'every="epoch" needs to know where an epoch ends, and '
            + ("there is no loader." if loader is None else "only the loader knows."),
            do="Give loader= a DataLoader over a dataset with a length, that shuffles or not by "
            "itself or by a DistributedSampler; or say a number of steps or a time, or call save() "
            "after each epoch.",
        )
    if len(set(lengths)) > 1:
        raise ConfigError(
            f'every="epoch" saves where all ranks end one; here they have {lengths} batches.',
            do="Give every rank as many, or say a number of steps or a time.",
        )
    return place
