"""Trainings with a known result that save as `Checkpointer` does."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import spotfit
from spotfit.checkpoint.format import SnapshotIndex, TensorPiece, aligned_offsets, split_into_chunks
from spotfit.checkpoint.reader import ReadRequest, SavedState, whole_piece_sink
from spotfit.checkpoint.restore_candidates import RestorePlan, RestoreSelector
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.checkpoint.snapshot_channel import SnapshotChannel
from spotfit.host.system import SystemClock
from spotfit.worker.training_api import require_session
from spotfit_localsim.live import crash_points
from spotfit_localsim.live.reference_jobs import next_chain_digest

StateDict = dict[str, Any]
# As `Checkpointer`: one segment is written while the other one is uploaded.
_SLOTS = 2
_BODY_BYTES = 2**18
FROZEN_BYTES = 2**20
"""Enough for a chunk of its own, which later checkpoints share."""
_INDEX_BYTES = 2**16


class CorruptRestoreError(Exception):
    """The restored state differs from the saved state, and no error was raised."""


def train_with_snapshots(config: dict[str, Any]) -> str:
    """A chain of hashes saved in snapshots: everything that `Checkpointer` does, without torch,
    which takes longer to import than the whole run.
    """
    crash_points.arm("worker")
    return _record_corruption(config, _SnapshotTrainer(config).train)


class _SnapshotTrainer:
    """One rank in one round."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        session = require_session("a chaos run")
        self._channel: SnapshotChannel = session.snapshot_channel
        self._context = session.context
        self._rank = session.context.get_world_rank()
        self._world_size = session.context.get_world_size()
        self._round = self._channel.new_segment_path(Path()).name.partition("-")[0]
        self._gather_count = 0
        self._next_slot = 0
        self._slots: list[tuple[ShmSegment | None, int | None]] = [(None, None)] * _SLOTS
        self._restored_state: StateDict = {}
        self._restored_pieces: dict[tuple[int, str], bytes] = {}

    def train(self) -> str:
        selector = RestoreSelector(
            self._channel,
            self._context,
            all_gather=self._all_gather,
            broadcast=lambda value: self._all_gather(value)[0],
            clock=SystemClock(),
        )
        saved = selector.read_newest(self._plan_restore)
        state: StateDict = {"step": 0, "steps": 0, "chain": ""}
        if saved is not None:
            state = self._restored_state
            # The pieces of every rank: a swapped or stale piece must not pass unnoticed.
            for rank in range(self._world_size):
                bodies = _piece_contents(rank, state["chain"])
                for piece, body in zip(_pieces(rank), bodies, strict=True):
                    if self._restored_pieces[rank, piece.name] != body:
                        message = f"{piece.name} of step {state['step']} in {saved.name}"
                        raise CorruptRestoreError(message)
        for step in range(state["step"] + 1, self._config["steps"] + 1):
            spotfit.collective.barrier()
            chain = next_chain_digest(state["chain"], step)
            state = {"step": step, "steps": state["steps"] + 1, "chain": chain}
            print(f"step {step}", flush=True)  # noqa: T201 - checked after the run
            SystemClock().wait(self._config["step_s"])
            if step % self._config["save_every"] == 0:
                self._save(state)
        return str(state["chain"])

    # --- saving, as `Checkpointer._save` does ------------------------------------------------

    def _save(self, state: StateDict) -> None:
        slot, self._next_slot = self._next_slot, (self._next_slot + 1) % _SLOTS
        segment, report = self._slots[slot]
        # The segment is still being uploaded: writing into it would tear the snapshot.
        if report is not None and self._channel.status_of(report) == "submitted":
            self._channel.wait_for_upload(report)
        metrics = {name: state[name] for name in ("step", "steps")}
        try:
            segment = segment or self._create_segment()
            self._fill_segment(segment, state)
        except OSError as error:
            # All ranks must report the step, also one that could not save.
            self._channel.skip(metrics, f"Not enough space for a snapshot: {error}")
            return
        self._slots[slot] = (segment, self._channel.submit(metrics, segment.path))

    def _create_segment(self) -> ShmSegment:
        # Shared memory first; the last folder is on disk, and its error is reported.
        *preferred, last = self._channel.segment_dirs
        for folder in preferred:
            try:
                return self._create_segment_in(folder)
            except OSError:
                continue
        return self._create_segment_in(last)

    def _create_segment_in(self, folder: Path) -> ShmSegment:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        capacity_bytes = _pieces(self._rank)[-1].end
        return ShmSegment.create(
            self._channel.new_segment_path(folder), capacity_bytes, _INDEX_BYTES
        )

    def _fill_segment(self, segment: ShmSegment, state: StateDict) -> None:
        segment.invalidate()
        pieces = _pieces(self._rank)
        for piece, body in zip(pieces, _piece_contents(self._rank, state["chain"]), strict=True):
            segment.payload[piece.start : piece.end] = body
        segment.publish(
            SnapshotIndex(
                rank=self._rank,
                world_size=self._world_size,
                step=state["step"],
                pieces=pieces,
                encoded_rank_state=json.dumps(state).encode(),
                chunks=split_into_chunks(pieces),
            )
        )

    # --- restoring, as `Checkpointer.restore` does -------------------------------------------

    def _plan_restore(self, saved: SavedState) -> RestorePlan:
        # Called again for the next candidate if a checkpoint turns out to be corrupt.
        self._restored_state = json.loads(saved.indices[self._rank].encoded_rank_state)
        self._restored_pieces = {}

        def take(rank: int, name: str, body: memoryview) -> None:
            self._restored_pieces[rank, name] = bytes(body)

        requests = (
            ReadRequest(
                index.rank, piece, whole_piece_sink(piece, partial(take, index.rank, piece.name))
            )
            for index in saved.indices
            for piece in index.pieces
        )
        return RestorePlan(saved.plan_reads(requests))

    def _all_gather(self, value: Any) -> list[Any]:
        """All-gather by files: without torch there is no process group."""
        self._gather_count += 1
        folder = Path(self._config["folder"], "gathered")
        folder.mkdir(exist_ok=True)
        # Files of earlier rounds remain; the round makes the names unique.
        stem = f"{self._round}-{self._gather_count}"
        (folder / f"{stem}-{self._rank}").write_bytes(pickle.dumps(value))
        spotfit.collective.barrier()
        files = [folder / f"{stem}-{rank}" for rank in range(self._world_size)]
        return [pickle.loads(file.read_bytes()) for file in files]  # noqa: S301 - our own


def _pieces(rank: int) -> tuple[TensorPiece, ...]:
    sizes = {"frozen": FROZEN_BYTES, "body": _BODY_BYTES}
    offsets = aligned_offsets(sizes.values())
    return tuple(
        TensorPiece(
            key=(str(rank), name),
            dtype="uint8",
            shape=(size,),
            offsets=(0,),
            sizes=(size,),
            start=start,
            size_bytes=size,
        )
        for (name, size), start in zip(sizes.items(), offsets, strict=True)
    )


def _piece_contents(rank: int, chain: str) -> tuple[bytes, bytes]:
    """Return the constant piece, and the piece that changes in every step."""
    return _repeat_to_size(f"{rank}", FROZEN_BYTES), _repeat_to_size(f"{rank}/{chain}", _BODY_BYTES)


def _repeat_to_size(seed: str, size_bytes: int) -> bytes:
    digest = hashlib.sha256(seed.encode()).digest()
    # A body that depends on the seed in every byte costs one digest.
    return digest * (size_bytes // len(digest))


# --- with torch ----------------------------------------------------------------------------------


def train_with_checkpointer(config: dict[str, Any]) -> str:
    """Adam, dropout, a scheduler and a shuffling loader, saved by a real `Checkpointer`."""
    crash_points.arm("worker")
    return _record_corruption(config, partial(_train_torch_model, config))


def _train_torch_model(config: dict[str, Any]) -> str:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from spotfit.torch import Checkpointer, init_module, prepare_data_loader, prepare_model

    # The order of sums depends on the number of threads.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with init_module():
        layers = nn.Linear(8, 64), nn.Dropout(0.1), nn.Linear(64, 64), nn.Linear(64, 1)
        model = prepare_model(nn.Sequential(*layers), parallel_strategy=config["strategy"])
    # Equal weights on all ranks, but different dropout masks.
    torch.manual_seed(spotfit.get_context().get_world_rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9])
    inputs = torch.arange(8.0 * 96).reshape(96, 8).sin()
    loader = prepare_data_loader(DataLoader(TensorDataset(inputs), batch_size=6, shuffle=True))
    counter = _StepCounter()
    ckpt = Checkpointer(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        extra={"counted": counter},
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
            counter.steps += 1
            SystemClock().wait(config["step_s"])
            ckpt.step({"step": ckpt.steps + 1, "steps": counter.steps})
            if ckpt.steps == config["steps"]:
                break
        epoch += 1
    return _model_digest(model)


class _StepCounter:
    """Counts executed steps, as user state of the checkpoint."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> StateDict:
        return {"steps": self.steps}

    def load_state_dict(self, state: StateDict) -> None:
        self.steps = state["steps"]


def _model_digest(model: Any) -> str:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    # The complete tensors, so that DDP and FSDP2 give the same digest.
    weights: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    bodies = [weight.cpu().numpy().tobytes() for weight in weights.values()]
    return hashlib.sha256(b"".join(bodies)).hexdigest()


def _record_corruption(config: dict[str, Any], train: Callable[[], str]) -> str:
    try:
        return train()
    except CorruptRestoreError as error:
        # The run would retry and might hide it: the audit finds the file.
        Path(config["folder"], "corruption").write_text(str(error))
        raise
