"""The function that workers of a prediction run: passes over the shards that are left.

At the start of a pass rank 0 lists the shards without an output and broadcasts them, so that all
ranks have the same list; each takes every n-th. A pass ends after a time that rank 0 measures; then
a checkpoint is committed, because an elastic run changes its size only after a commit, and what is
left is distributed again. A restarted round therefore repeats at most one shard per worker, and a
slow machine delays the others by one shard per pass.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.collective import barrier, broadcast_from_rank_zero
from spotfit.core.cached import cached_property
from spotfit.core.clock import Clock
from spotfit.core.codec import encode
from spotfit.host.system import SystemClock
from spotfit.prediction.batches import (
    Batch,
    BatchFormat,
    check_batch,
    concatenate,
    encode_file,
    split_rows,
)
from spotfit.prediction.predictor import PredictFunction, PredictorSource
from spotfit.prediction.shard_outputs import PredictionJob, ShardOutputs
from spotfit.prediction.shards import Shard
from spotfit.store.factory import open_store
from spotfit.store.retry import PATIENT_RETRY_POLICY
from spotfit.worker.training_api import get_context, report

_MAX_PASS_S = 600.0  # a machine that was granted waits at most this long


@dataclass(frozen=True)
class PredictionTask:
    """All that a worker needs, pickled with the training function."""

    output_url: str
    job: PredictionJob
    shards: tuple[Shard, ...]
    predictor: PredictorSource
    batch_size: int | None
    batch_format: BatchFormat
    # At the end of a pass a rank waits for half a shard on average: 2.5 % of 20 shards.
    shards_per_pass: float = 20.0
    """The length of a pass, in durations of a shard."""
    min_pass_s: float = 15.0
    """The shortest pass: each costs a few requests."""


def run_prediction(config: dict[str, Any]) -> int:
    """Predict the shards that are left, as one rank of a round; return the number of rows.

    `config["task"]` is a `PredictionTask`. Collective: all ranks call it. The manifest is written
    before it returns. Exceptions of the predictor propagate, with the name of the shard as a note.
    """
    with ExitStack() as stack:
        return PredictionWorker(config["task"], stack).run()


@dataclass
class PredictionWorker:
    """One rank of a round."""

    task: PredictionTask
    stack: ExitStack
    clock: Clock = field(default_factory=SystemClock)
    _shard_s: float = 0.0
    """Duration of the latest shard of this rank."""

    def run(self) -> int:
        context = get_context()
        rank, world_size = context.get_world_rank(), context.get_world_size()
        if rank == 0:
            self._outputs.begin()
        left, pass_s = self._next_pass(rank)
        while left:
            self._work_on(left[rank::world_size], pass_s=pass_s)
            barrier()
            left, pass_s = self._next_pass(rank, is_last_over=True)
        rows = 0
        if rank == 0:
            rows = self._outputs.write_manifest([shard.name for shard in self.task.shards]).rows
        barrier()
        return rows

    def _next_pass(self, rank: int, *, is_last_over: bool = False) -> tuple[list[Shard], float]:
        """Return the shards that are left, and the length of the next pass in seconds."""
        plan = None
        if rank == 0:
            recorded = self._outputs.recorded()
            plan = _pack([shard.name not in recorded for shard in self.task.shards])
            if is_last_over:
                self._commit(len(recorded))
        elif is_last_over:
            report({})
        packed, pass_s = broadcast_from_rank_zero((plan, self._pass_s()))
        is_left = _unpack(packed, len(self.task.shards))
        shards = [shard for shard, left in zip(self.task.shards, is_left, strict=True) if left]
        return shards, pass_s

    def _commit(self, done: int) -> None:
        """Report the progress with a checkpoint, which waits for the reports of all ranks."""
        total = len(self.task.shards)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "progress.json").write_bytes(encode({"shards_done": done}))
            report(
                {"shards_done": done, "shards": total},
                checkpoint=Checkpoint.from_directory(directory),
                progress=done / total,
            )

    def _pass_s(self) -> float:
        measured_s = self.task.shards_per_pass * self._shard_s
        return max(self.task.min_pass_s, min(measured_s, _MAX_PASS_S))

    def _work_on(self, shards: Sequence[Shard], *, pass_s: float) -> None:
        """Predict these shards in order for `pass_s`, at least one; read one in advance."""
        if not shards:
            return
        predict = self._predict  # the model is loaded before times are measured
        with ThreadPoolExecutor(1, "spotfit-read") as reader:
            started = self.clock.now()
            ends_at = started + pass_s
            reading: Future[Batch] | None = None
            for shard, following in zip_longest(shards, shards[1:]):
                batch = (reading or reader.submit(self._read, shard)).result()
                # What is read in advance and not predicted in this pass would be read in vain.
                is_last = following is None or self.clock.now() + self._shard_s >= ends_at
                reading = None if is_last else reader.submit(self._read, following)
                self._complete(shard, batch, predict)
                ended = self.clock.now()
                self._shard_s, started = ended - started, ended
                if ended >= ends_at:
                    return

    def _read(self, shard: Shard) -> Batch:
        try:
            return shard.source.read(self.task.batch_format)
        except Exception as error:
            error.add_note(f"while shard {shard.name} was read: {shard.source}")
            raise

    def _complete(self, shard: Shard, batch: Batch, predict: PredictFunction) -> None:
        try:
            predictions = concatenate(
                [
                    check_batch(predict(part), source="The predictor")
                    for part in split_rows(batch, self.task.batch_size)
                ]
            )
            body = encode_file(predictions, self._outputs.output_format)
        except Exception as error:
            error.add_note(f"while shard {shard.name} was predicted: {shard.source}")
            raise
        self._outputs.write(shard.name, body, source=str(shard.source))

    @cached_property
    def _predict(self) -> PredictFunction:
        # Created for the first batch: a rank without shards loads no model.
        return self.stack.enter_context(self.task.predictor.open())

    @cached_property
    def _outputs(self) -> ShardOutputs:
        store = open_store(self.task.output_url, PATIENT_RETRY_POLICY)
        return ShardOutputs(store, self.task.job)


def _pack(flags: Sequence[bool]) -> bytes:
    """Return the flags in few bytes: broadcasts are for small values."""
    return zlib.compress(bytes(flags))


def _unpack(packed: bytes, count: int) -> list[bool]:
    flags = zlib.decompress(packed)
    assert len(flags) == count
    return [bool(flag) for flag in flags]
