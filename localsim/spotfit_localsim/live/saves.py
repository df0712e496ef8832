"""Trainings that save as a Checkpointer does, and whose result is known."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import spotfit
from spotfit.checkpoint.saved import Saved, Wanted, at_once
from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import Index, Piece, chunks_of, starts
from spotfit.host.clocks import SystemClock
from spotfit.worker.current import current
from spotfit.worker.handover import Handover
from spotfit.worker.recall import Planned, Recall
from spotfit_localsim.live import mines
from spotfit_localsim.live.jobs import link

State = dict[str, Any]
_SLOTS = 2
_BODY_BYTES = 2**18
FROZEN_BYTES = 2**20
"""Enough for a chunk of its own, which later checkpoints share."""
_INDEX_BYTES = 2**16


class TornState(Exception):  # noqa: N818  # told as the user's own exception
    """What was restored is not what was saved, though nobody said so."""


def keep(config: dict[str, Any]) -> str:
    """A chain of digests in lock step, saved in snapshots: all that a Checkpointer does, but for
    torch, whose import takes longer than the story."""
    mines.lay("worker")
    return _told_of_torn(config, _Keeper(config).train)


class _Keeper:
    """One rank, in one round."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        session = current("a story")
        self._desk: Handover = session.snapshots
        self._context = session.context
        self._rank = session.context.get_world_rank()
        self._world_size = session.context.get_world_size()
        self._round = self._desk.path_for(Path()).name.partition("-")[0]
        self._gathered = 0
        self._next = 0
        self._slots: list[tuple[Segment | None, int | None]] = [(None, None)] * _SLOTS
        self._read: State = {}
        self._found: dict[tuple[int, str], bytes] = {}

    def train(self) -> str:
        recall = Recall(
            self._desk,
            self._context,
            gather=self._gather,
            broadcast=lambda mine: self._gather(mine)[0],
            clock=SystemClock(),
        )
        found = recall.newest(self._plan)
        if found is not None:
            self._check(found)
        blank: State = {"step": 0, "steps": 0, "chain": ""}
        state = self._read if found else blank
        for step in range(state["step"] + 1, self._config["steps"] + 1):
            spotfit.collective.barrier()
            chain = link(state["chain"], step)
            state = {"step": step, "steps": state["steps"] + 1, "chain": chain}
            SystemClock().wait(self._config["pace_s"])
            if step % self._config["save_every"] == 0:
                self._save(state)
        return str(state["chain"])

    # --- saving, as `Checkpointer._save` does ------------------------------------------------

    def _save(self, state: State) -> None:
        at, self._next = self._next, (self._next + 1) % _SLOTS
        segment, report = self._slots[at]
        if report is not None and self._desk.fate(report) == "given":
            self._desk.wait(report)
        metrics = {name: state[name] for name in ("step", "steps")}
        try:
            segment = segment or self._segment()
            self._fill(segment, state)
        except OSError as full:
            self._desk.withhold(metrics, f"There is no room for a snapshot: {full}")
            return
        self._slots[at] = (segment, self._desk.give(metrics, segment.path))

    def _segment(self) -> Segment:
        *best, last = self._desk.folders
        for folder in best:
            try:
                return self._segment_in(folder)
            except OSError:
                continue
        return self._segment_in(last)

    def _segment_in(self, folder: Path) -> Segment:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        capacity_bytes = _pieces(self._rank)[-1].end
        return Segment.create(self._desk.path_for(folder), capacity_bytes, _INDEX_BYTES)

    def _fill(self, segment: Segment, state: State) -> None:
        segment.begin()
        pieces = _pieces(self._rank)
        for piece, body in zip(pieces, _bodies(self._rank, state["chain"]), strict=True):
            segment.bytes[piece.start : piece.end] = body
        segment.finish(
            Index(
                self._rank,
                self._world_size,
                state["step"],
                pieces,
                own=json.dumps(state).encode(),
                chunks=chunks_of(pieces),
            )
        )

    # --- restoring, as `Checkpointer.restore` does -------------------------------------------

    def _plan(self, saved: Saved) -> Planned:
        self._read = json.loads(saved.indices[self._rank].own)
        self._found = {}

        def take(rank: int, name: str, body: memoryview) -> None:
            self._found[rank, name] = bytes(body)

        wanted = (
            Wanted(index.rank, piece, at_once(piece, partial(take, index.rank, piece.name)))
            for index in saved.indices
            for piece in index.pieces
        )
        return Planned(saved.orders(wanted))

    def _check(self, saved: Saved) -> None:
        for rank in range(self._world_size):
            bodies = _bodies(rank, self._read["chain"])
            for piece, body in zip(_pieces(rank), bodies, strict=True):
                if self._found[rank, piece.name] != body:
                    raise TornState(f"{piece.name} of step {self._read['step']} in {saved.name}")

    def _gather(self, mine: Any) -> list[Any]:
        """By way of files: torch would have a group of its own."""
        self._gathered += 1
        folder = Path(self._config["folder"], "gathered")
        folder.mkdir(exist_ok=True)
        stem = f"{self._round}-{self._gathered}"
        (folder / f"{stem}-{self._rank}").write_bytes(pickle.dumps(mine))
        spotfit.collective.barrier()
        files = [folder / f"{stem}-{rank}" for rank in range(self._world_size)]
        return [pickle.loads(file.read_bytes()) for file in files]  # noqa: S301 - our own


def _pieces(rank: int) -> tuple[Piece, ...]:
    sizes = {"frozen": FROZEN_BYTES, "body": _BODY_BYTES}
    places = starts(sizes.values())
    return tuple(
        Piece((str(rank), name), "uint8", (size,), (0,), (size,), start, size)
        for (name, size), start in zip(sizes.items(), places, strict=True)
    )


def _bodies(rank: int, chain: str) -> tuple[bytes, bytes]:
    """What never changes, and what always does."""
    return _expanded(f"{rank}", FROZEN_BYTES), _expanded(f"{rank}/{chain}", _BODY_BYTES)


def _expanded(seed: str, size_bytes: int) -> bytes:
    word = hashlib.sha256(seed.encode()).digest()
    return word * (size_bytes // len(word))


# --- with torch ----------------------------------------------------------------------------------


def learn(config: dict[str, Any]) -> str:
    """Adam, dropout, a schedule and a shuffling loader in a real Checkpointer's care."""
    mines.lay("worker")
    return _told_of_torn(config, partial(_learnt, config))


def _learnt(config: dict[str, Any]) -> str:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from spotfit.torch import Checkpointer, init_module, prepare_data_loader, prepare_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with init_module():
        layers = nn.Linear(8, 64), nn.Dropout(0.1), nn.Linear(64, 64), nn.Linear(64, 1)
        model = prepare_model(nn.Sequential(*layers), parallel_strategy=config["strategy"])
    torch.manual_seed(spotfit.get_context().get_world_rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9])
    inputs = torch.arange(8.0 * 96).reshape(96, 8).sin()
    loader = prepare_data_loader(DataLoader(TensorDataset(inputs), batch_size=6, shuffle=True))
    counted = _Counted()
    ckpt = Checkpointer(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        extra={"counted": counted},
        every=config["save_every"],
    )
    restored = ckpt.restore()
    epoch = restored.epoch if restored else 0
    while ckpt.steps < config["steps"]:
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for (batch,) in loader:
            loss = (model(batch) - batch.mean(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            counted.steps += 1
            SystemClock().wait(config["pace_s"])
            ckpt.step({"step": ckpt.steps + 1, "steps": counted.steps})
            if ckpt.steps == config["steps"]:
                break
        epoch += 1
    return _digest(model)


class _Counted:
    """Steps that this state has behind it."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> State:
        return {"steps": self.steps}

    def load_state_dict(self, state: State) -> None:
        self.steps = state["steps"]


def _digest(model: Any) -> str:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    whole: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    bodies = [weight.cpu().numpy().tobytes() for weight in whole.values()]
    return hashlib.sha256(b"".join(bodies)).hexdigest()


def _told_of_torn(config: dict[str, Any], train: Callable[[], str]) -> str:
    try:
        return train()
    except TornState as torn:
        Path(config["folder"], "torn").write_text(str(torn))
        raise
