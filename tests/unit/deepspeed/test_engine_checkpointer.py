"""Checkpointer with real engines in one process; tests/frameworks has those of several workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: make deepspeed")

import torch

from spotfit.checkpoint import base_checkpointer
from spotfit.checkpoint.reader import MemoryShardReader, SavedState
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.checkpoint.snapshot_channel import (
    IN_MEMORY_NAME,
    GroupOutlook,
    run_save_at_end,
)
from spotfit.core.errors import ConfigError
from spotfit.deepspeed import Checkpointer
from spotfit.deepspeed.engine_state import EngineState
from spotfit.model.failure_model import FailureModel
from spotfit.testing.builders import ManualClock
from spotfit.torch import Checkpointer as TorchCheckpointer
from spotfit.torch import export_checkpoint
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession
from tests.unit.deepspeed.engines import (
    SmallModel,
    everything,
    make_engine,
    process_group,
    train_batch,
)

__all__ = ["process_group"]
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def session(process_group: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSession]:
    """A session in which each simulated process may create an engine and a Checkpointer."""
    monkeypatch.setattr(base_checkpointer, "_reject_second_checkpointer", lambda _: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    session = LocalSession("run")
    training_api.set_session(session)
    yield session
    training_api.clear_session()


STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
CONFIGS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # The first steps overflow.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 28}},
}


class TrainingProcess:
    """One process of a training; a new object represents the process after a restart."""

    def __init__(self, stage: int, *, every: Any = 4, **config: Any) -> None:
        self.engine = make_engine(stage, **config)
        self.ckpt = Checkpointer(self.engine, every=every)
        self.restored = self.ckpt.restore()

    def train(self, steps: int) -> list[float]:
        while self.ckpt.steps < steps:
            train_batch(self.engine)
            self.ckpt.step({"loss": 1.0})
        return everything(self.engine)

    @property
    def newest_segment(self) -> Path:
        used = [slot for slot in self.ckpt._slots if slot.report_index is not None]
        return max(used, key=lambda slot: slot.report_index or 0).arena.path


@STAGES
@pytest.mark.parametrize("dtype", CONFIGS)
def test_a_resumed_training_ends_like_an_undisturbed_one(stage: int, dtype: str) -> None:
    config: Any = CONFIGS[dtype]
    undisturbed = TrainingProcess(stage, every=100, **config)
    end = undisturbed.train(11)
    assert (undisturbed.engine.skipped_steps > 0) == (dtype == "fp16")
    TrainingProcess(stage, **config).train(6)
    second = TrainingProcess(stage, **config)
    assert second.restored is not None
    assert (second.restored.step, second.engine.global_steps) == (4, 4)
    assert second.train(11) == end


@STAGES
def test_a_restore_after_saves_rolls_back(stage: int) -> None:
    process = TrainingProcess(stage)
    process.train(4)
    end = process.train(7)
    assert process.ckpt.restore() is not None
    assert process.ckpt.steps == 4
    assert process.train(7) == end


@STAGES
def test_a_save_returns_while_the_upload_waits_and_keeps_the_state_of_its_step(
    stage: int, session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = TrainingProcess(stage, every=100).train(8)
    channel = session.snapshot_channel
    monkeypatch.setattr(channel, "submit", lambda *_, **__: 0)
    monkeypatch.setattr(channel, "status_of", lambda _: "submitted")
    first = TrainingProcess(stage, every=3)
    first.train(5)  # two steps after the snapshot
    saved = SavedState([MemoryShardReader(ShmSegment.open(first.newest_segment))], IN_MEMORY_NAME)
    monkeypatch.setattr(channel, "open_in_memory", lambda: saved)
    monkeypatch.setattr(channel, "reopen", lambda _: saved)
    second = TrainingProcess(stage, every=100)
    assert second.restored == ("", 3, 0, "memory")
    assert second.train(8) == end


def test_the_interval_is_chosen_by_measured_costs(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    monkeypatch.setattr(base_checkpointer, "SystemClock", lambda: clock)
    outlook = GroupOutlook(failure_model=FailureModel())
    monkeypatch.setattr(session.snapshot_channel, "outlook", lambda: outlook)
    write = Checkpointer._write_snapshot

    def write_slowly(self: Checkpointer, *args: Any) -> None:
        clock.wait(1.0)
        write(self, *args)

    monkeypatch.setattr(Checkpointer, "_write_snapshot", write_slowly)
    process = TrainingProcess(2, every="auto")
    saved_steps = []
    for step in range(1, 400):
        clock.wait(5.0)
        process.train(step)
        if process.ckpt._saved_step == step:
            saved_steps.append(step)
    first, second, third = saved_steps[:3]
    assert first * 5.0 >= 30.0, "the first save measures the costs"
    assert third - second == second - first > 1
    assert session.latest_checkpoint() is not None


@STAGES
def test_no_tensor_is_saved_twice_as_a_buffer(stage: int) -> None:
    process = TrainingProcess(stage)
    buffers = process.ckpt._training_state.engine_state.state_dict()["buffers"]
    assert buffers.keys() == {"mean"}


@STAGES
def test_a_rank_keeps_its_own_buffers(stage: int) -> None:
    """A restore reads those of rank 0 into the buffers in use, as part of the model."""
    engine = TrainingProcess(stage).engine
    engine.module.mean.fill_(2.0)
    saved = EngineState(engine).state_dict()
    engine.module.mean.fill_(1.0)
    assert saved["buffers"]["mean"].eq(2.0).all()
    EngineState(engine).load_state_dict(saved)
    assert engine.module.mean.eq(2.0).all()


@STAGES
def test_steps_that_accumulate_gradients_are_not_saved(stage: int) -> None:
    config = {"gradient_accumulation_steps": 3}
    end = TrainingProcess(stage, every=100, **config).train(12)
    process = TrainingProcess(stage, every=4, **config)
    process.train(8)
    assert process.ckpt._saved_step == 6, "the next update"
    second = TrainingProcess(stage, every=100, **config)
    assert second.restored is not None
    assert (second.restored.step, second.engine.global_steps) == (6, 2)
    assert second.train(12) == end


@STAGES
def test_batches_counted_per_epoch_by_the_caller_do_not_hide_accumulated_gradients(
    stage: int,
) -> None:
    """As in a loop that begins to count in each epoch; the engine counts across epochs."""
    config = {"gradient_accumulation_steps": 2}
    epoch_batches = 3
    end = TrainingProcess(stage, every=100, **config).train(12)
    process = TrainingProcess(stage, every=1, **config)
    saved_steps = []
    while process.ckpt.steps < 9:
        train_batch(process.engine)
        is_odd = (process.ckpt.steps % epoch_batches) % 2 == 0
        process.ckpt.step(accumulating=is_odd)
        saved_steps.append(process.ckpt._saved_step)
    assert saved_steps == [0, 2, 2, 2, 2, 2, 2, 8, 8], "where both have counted two batches"
    second = TrainingProcess(stage, every=100, **config)
    assert second.restored is not None
    assert (second.restored.step, second.engine.global_steps) == (8, 4)
    assert second.train(12) == end


@STAGES
def test_the_last_steps_are_saved_at_the_end(stage: int, session: LocalSession) -> None:
    process = TrainingProcess(stage, every=100)
    end = process.train(5)
    saved = run_save_at_end(session.snapshot_channel)
    assert saved is not None
    assert (saved.error, saved.has_snapshot) == ("", True)
    second = TrainingProcess(stage)
    assert second.restored is not None
    assert second.restored.step == 5
    assert everything(second.engine) == end


def test_weights_of_zero_2_are_exported(session: LocalSession, tmp_path: Path) -> None:
    process = TrainingProcess(2)
    process.train(4)
    checkpoint = session.latest_checkpoint()
    assert checkpoint is not None
    export_checkpoint(checkpoint, tmp_path / "model.pt")
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    current = process.engine.module.state_dict()
    assert weights.keys() == current.keys()
    assert all(torch.equal(weights[name], one) for name, one in current.items())


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_checkpoint_without_weights_is_not_exported(
    session: LocalSession, tmp_path: Path, suffix: str
) -> None:
    TrainingProcess(3).train(4)
    checkpoint = session.latest_checkpoint()
    assert checkpoint is not None
    with pytest.raises(ConfigError, match="has no weights"):
        export_checkpoint(checkpoint, tmp_path / f"model.{suffix}")


CURRICULUM = {"enabled": True, "data_cluster_path": "", "curriculum_metrics": {}}
RANDOM_LTD = {
    "enabled": True,
    "total_layer_num": 2,
    "random_ltd_layer_num": 1,
    "random_ltd_layer_id": [0],
    "model_mask_name": None,
    "model_type": "decoder",
    "hidden_state_order": "seq_batch_dim",
    "random_ltd_schedule": {
        "min_value": 1,
        "max_value": 4,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 4, "seq_per_step": 1},
    },
}


def sgd() -> Any:
    return {
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "zero_allow_untested_optimizer": 1,
    }


class SwappedModel(SmallModel):
    """The same parameters in another order."""

    def __init__(self) -> None:
        super().__init__()
        body, head = self.body, self.head
        del self.body, self.head, self.tied
        self.head, self.tied, self.body = head, head, body


@pytest.mark.parametrize(
    ("saved_stage", "stage", "config", "message"),
    [
        (1, 3, {}, r"with ZeRO 1, but the engine has ZeRO 3"),
        (3, 2, {}, r"with ZeRO 3, but the engine has ZeRO 2"),
        *((stage, stage, sgd(), "optimizer AdamW, but the engine has SGD") for stage in (1, 2, 3)),
        *(
            (stage, stage, {"model": SmallModel(width=7)}, r"body.weight is \(7, 7\), was \(6, 6\)")
            for stage in (1, 2, 3)
        ),
        *(
            (stage, stage, {"model": SwappedModel()}, "the same parameters, but in other groups")
            for stage in (1, 2, 3)
        ),
    ],
)
def test_another_layout_is_rejected_before_anything_is_read(
    saved_stage: int, stage: int, config: Any, message: str
) -> None:
    TrainingProcess(saved_stage).train(4)
    engine = make_engine(stage, **config)
    before = everything(engine)
    ckpt = Checkpointer(engine)
    with pytest.raises(ConfigError, match=message) as error:
        ckpt.restore()
    assert error.value.details["retryable"] is False
    assert everything(engine) == before


def test_another_number_of_workers_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    TrainingProcess(1).train(4)
    ckpt = Checkpointer(make_engine(1))
    ckpt._world_size = 4
    with pytest.raises(ConfigError, match="saved by 1 workers; ZeRO's partitions"):
        ckpt.restore()


def test_a_checkpoint_of_another_checkpointer_is_rejected() -> None:
    TorchCheckpointer(model=SmallModel()).save()
    ckpt = Checkpointer(make_engine(1))
    with pytest.raises(ConfigError, match=r"not saved by spotfit\.deepspeed\.Checkpointer"):
        ckpt.restore()


def test_an_engine_without_zero_is_rejected() -> None:
    with pytest.raises(ConfigError, match="with ZeRO, which this engine does not use"):
        Checkpointer(make_engine(0))


@pytest.mark.parametrize(
    ("data_efficiency", "message"),
    [
        ({"data_routing": {"random_ltd": RANDOM_LTD}}, "random_ltd"),
        ({"data_sampling": {"curriculum_learning": CURRICULUM}}, "curriculum_learning"),
    ],
)
def test_an_engine_with_further_state_is_rejected(data_efficiency: Any, message: str) -> None:
    parts = {name: {"enabled": True, **part} for name, part in data_efficiency.items()}
    engine = make_engine(1, data_efficiency={"enabled": True, **parts})
    with pytest.raises(ConfigError, match=message):
        Checkpointer(engine)


def test_an_elastic_group_is_rejected(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(1)
    outlook = GroupOutlook(allows_resize=True)
    monkeypatch.setattr(session.snapshot_channel, "outlook", lambda: outlook)
    with pytest.raises(ConfigError, match="lets the group change its size"):
        Checkpointer(engine)
