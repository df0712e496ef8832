"""A transformers.Trainer on two machines: losses of workers and machines do not change it."""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import spotfit
import spotfit.data
from spotfit.checkpoint.snapshot_channel import GroupOutlook
from spotfit.client.run_handle import RunHandle
from spotfit.data.iteration.data_iterator import DataIterator
from spotfit.data.iteration.shard import ShardGroup, ShardPosition
from spotfit.policy.retry_budget import is_permanent_error
from spotfit.torch import TorchTrainer, export_checkpoint
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession, LocalSnapshotChannel
from tests.frameworks.next_process import begin_next_process
from tests.live.cloud import LiveTestCloud

pytest.importorskip("transformers")

from sklearn.datasets import load_digits
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from spotfit.huggingface import TransformersTrainer, export_pretrained, prepare_trainer

Config = dict[str, Any]
STEPS = 19
"""Optimizer steps per epoch of four workers."""


class Digits(Dataset[dict[str, Any]]):
    """Images of digits as 64 tokens; records which samples are read."""

    def __init__(self, samples: slice, log: Path | None = None) -> None:
        digits = load_digits()
        self._tokens = torch.tensor(digits.data[samples], dtype=torch.long)
        self._labels = torch.tensor(digits.target[samples])
        self._log = log

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._log is not None:
            with self._log.open("a") as log:
                log.write(f"{index}\n")
        return {"input_ids": self._tokens[index], "labels": self._labels[index]}


def tiny_bert() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=17,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        num_labels=10,
    )
    torch.manual_seed(3)
    return BertForSequenceClassification(config)


class Interrupter(TrainerCallback):
    """Kills ranks once after a step, or lets one wait; `kills` are pairs of a step and a rank."""

    def __init__(self, config: Config, marks: Path) -> None:
        self._kills = config.get("kills", [])
        self._waits_at = config.get("waits_at")
        self._marks = marks

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        rank, step = spotfit.get_context().get_world_rank(), state.global_step
        mark = self._marks / f"killed-{step}-{rank}"
        if (step, rank) in self._kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        waits = self._marks.parent / "waits"
        if (step, rank) == (self._waits_at, 3) and not waits.exists():
            waits.touch()
            signal.pause()


def train(config: Config) -> Config:
    """Train a tiny BERT with dropout and a linear schedule; return what must not change."""
    from spotfit.huggingface import prepare_trainer

    rank = spotfit.get_context().get_world_rank()
    marks = Path(config["marks"], config["label"])
    marks.mkdir(exist_ok=True)
    reads = marks / f"reads-{rank}"
    reads.write_text("")  # of the last attempt only
    trainer = Trainer(
        model=tiny_bert(),
        args=arguments(marks, config),
        train_dataset=Digits(slice(600), reads),
        eval_dataset=Digits(slice(600, 700)),
        callbacks=[Interrupter(config, marks), *config.get("callbacks", [])],
    )
    trainer = prepare_trainer(trainer, every=config.get("every", 4))
    result = trainer.train()
    return {
        "weights": digest_of(trainer.model),
        "loss": result.training_loss,
        "steps": result.global_step,
        "log": without_durations(trainer.state.log_history),
    }


def arguments(marks: Path, config: Config) -> TrainingArguments:
    options = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 8,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "logging_steps": 5,
        "ddp_find_unused_parameters": True,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        **config.get("arguments", {}),
    }
    return TrainingArguments(output_dir=str(marks / "output"), **options)


def digest_of(model: torch.nn.Module) -> str:
    tensors = model.state_dict().values()
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in tensors)).hexdigest()


def without_durations(log: list[Config]) -> list[Config]:
    durations = ("runtime", "per_second")
    return [
        {name: value for name, value in entry.items() if not name.endswith(durations)}
        for entry in log
    ]


def submit(cloud: LiveTestCloud, name: str, *, fn: Any = train, **config: Any) -> RunHandle:
    return cloud.submit(
        fn,
        workers=4,
        nodes=2,
        name=name,
        trainer_type=TorchTrainer,
        max_failures=len(config.get("kills", [])),
        config={"label": name, **config},
    )


def fit(cloud: LiveTestCloud, name: str, **config: Any) -> Config:
    result: Config = submit(cloud, name, **config).result(240).return_value
    return result


@pytest.mark.timeout(300)
def test_killed_workers_change_neither_weights_nor_logs(cloud: LiveTestCloud) -> None:
    """Nor the learning rates, the evaluations and the mean of the losses, which are logged."""
    undisturbed = fit(cloud, "undisturbed")
    kills = [(6, 1), (30, 3), (31, 0)]
    killed = fit(cloud, "killed", kills=kills)
    assert len(cloud.rounds_opened("killed")) == len(kills) + 1
    assert killed == undisturbed
    evaluations = [entry for entry in killed["log"] if "eval_loss" in entry]
    assert (len(evaluations), killed["steps"]) == (3, 3 * STEPS)
    # The third kill: 30 steps were done, of them 28 saved, which is step 9 of the second epoch.
    resumed = (cloud.marks / "killed" / "reads-0").read_text().split()
    whole = (cloud.marks / "undisturbed" / "reads-0").read_text().split()
    assert resumed == whole[(28 * 8) :], "skipped batches must not be read"


@pytest.mark.timeout(300)
def test_a_lost_machine_changes_nothing(cloud: LiveTestCloud) -> None:
    """With gradient accumulation, loader processes and a sampler that draws from the global RNG."""
    how: Config = {
        "arguments": {
            "num_train_epochs": 2,
            "gradient_accumulation_steps": 2,
            "train_sampling_strategy": "group_by_length",
            "length_column_name": "labels",
            "per_device_train_batch_size": 4,
        },
        "every": 3,
    }
    undisturbed = fit(cloud, "undisturbed", **how)
    handle = submit(cloud, "lost", waits_at=25, **how)
    cloud.wait_for_mark("waits")
    cloud.reclaimer.kill(cloud.node_of_rank(3, "lost"))
    assert handle.result(240).return_value == undisturbed
    assert len(cloud.rounds_opened("lost")) == 2


def test_workers_that_would_train_a_model_each_are_rejected(cloud: LiveTestCloud) -> None:
    """Without GPUs and use_cpu, Accelerate does not look for a group."""
    with pytest.raises(spotfit.WorkerGroupError, match="a model of its own"):
        fit(cloud, "run", arguments={"use_cpu": False})
    assert len(cloud.rounds_opened("run")) == 1


class RowSum(torch.nn.Module):
    """Records the rows of its batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(1, 1)
        self.rows: list[int] = []

    def forward(self, id: torch.Tensor) -> Config:  # noqa: A002 - the column of range()
        self.rows += id.tolist()
        return {"loss": self.linear(id.float()[:, None] / ROWS_OF_GROUP).square().mean()}


class RecordRows(TrainerCallback):
    """Writes the rows of each step; a group of four ranks waits in its fifth step."""

    def __init__(self, marks: Path) -> None:
        self._marks, self._context = marks, spotfit.get_context()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        name = f"begins-{self._context.get_world_size()}-{self._context.get_world_rank()}"
        (self._marks / name).write_text(str(state.global_step))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4 and self._context.get_world_size() == 4:
            (self._marks / f"waits-{self._context.get_world_rank()}").touch()
            signal.pause()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = getattr(kwargs["model"], "module", kwargs["model"])
        size, rank = self._context.get_world_size(), self._context.get_world_rank()
        path = self._marks / f"rows-{size}-{state.global_step}-{rank}"
        path.write_text(" ".join(map(str, model.rows)))
        model.rows.clear()


ROWS_OF_GROUP = 160
"""Of an epoch: eight steps of four ranks, or sixteen steps of two ranks."""


def train_on_shard_of_group(config: Config) -> int:
    """Train on a dataset shard; save by the Trainer, and resume as with Ray Train."""
    from spotfit.huggingface.transformers import RayTrainReportCallback, prepare_trainer

    marks = Path(config["marks"])
    output = marks / f"node-{spotfit.get_context().get_node_rank()}"
    how = {"max_steps": 24, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}
    trainer = Trainer(
        model=RowSum(),
        args=arguments(output, {"arguments": how}),
        train_dataset=spotfit.get_dataset_shard("train").iter_torch_batches(batch_size=5),
        callbacks=[RecordRows(marks), RayTrainReportCallback()],
    )
    trainer = prepare_trainer(trainer)
    if checkpoint := spotfit.get_checkpoint():
        with checkpoint.as_directory() as folder:
            trainer.train(resume_from_checkpoint=str(Path(folder, "checkpoint")))
    else:
        trainer.train()
    return int(trainer.state.global_step)


@pytest.mark.timeout(300)
def test_a_resized_group_trains_on_each_row_of_a_shard_once_per_epoch(cloud: LiveTestCloud) -> None:
    """Four ranks train some steps of the epoch, two ranks the rest of it and the next one."""
    handle = cloud.submit(
        train_on_shard_of_group,
        workers=(2, 4),
        nodes=2,
        trainer_type=TorchTrainer,
        datasets={"train": spotfit.data.range(ROWS_OF_GROUP)},
        scaling_options={"elastic_resize_monitor_interval_s": 0.2},
    )
    for rank in range(4):
        cloud.wait_for_mark(f"waits-{rank}")
    cloud.reclaimer.set_capacity(1)
    cloud.reclaimer.kill(cloud.node_of_rank(3))
    steps = handle.result(240).return_value
    cloud.reclaimer.set_capacity(None)
    saved = int((cloud.marks / "begins-2-0").read_text())
    assert 0 < saved <= 4
    assert steps == 24

    def rows_of(size: int, first: int, last: int) -> list[int]:
        paths = (
            cloud.marks / f"rows-{size}-{step}-{rank}"
            for step in range(first, last + 1)
            for rank in range(size)
        )
        return [int(row) for path in paths for row in path.read_text().split()]

    rest = saved + (8 - saved) * 2
    first_epoch = rows_of(4, 1, saved) + rows_of(2, saved + 1, rest)
    assert sorted(first_epoch) == list(range(ROWS_OF_GROUP))
    second_epoch = rows_of(2, rest + 1, 24)
    assert len(set(second_epoch)) == len(second_epoch) == (24 - rest) * 10


def train_and_report(config: Config) -> Config:
    """Train as with Ray Train: save by the Trainer, report by the callback, resume by hand."""
    from spotfit.huggingface.transformers import RayTrainReportCallback, prepare_trainer

    rank = spotfit.get_context().get_world_rank()
    marks = Path(config["marks"], config["label"])
    node_marks = marks / f"node-{spotfit.get_context().get_node_rank()}"
    node_marks.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        model=tiny_bert(),
        args=arguments(marks if config["is_shared"] else node_marks, config),
        train_dataset=Digits(slice(256)),
        eval_dataset=Digits(slice(600, 700)),
        callbacks=[Interrupter(config, marks)],
    )
    trainer.add_callback(RayTrainReportCallback())
    trainer = prepare_trainer(trainer)
    checkpoint = spotfit.get_checkpoint()
    if checkpoint is None:
        trainer.train()
    else:
        (marks / f"resumed-{rank}").touch()
        with checkpoint.as_directory() as folder:
            trainer.train(resume_from_checkpoint=str(Path(folder, "checkpoint")))
    return {"weights": digest_of(trainer.model), "steps": trainer.state.global_step}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_shared", [True, False])
def test_the_report_callback_reports_the_files_of_all_ranks(
    cloud: LiveTestCloud, *, is_shared: bool
) -> None:
    saves = {"num_train_epochs": 2, "save_strategy": "epoch", "save_total_limit": 1}
    handle = submit(
        cloud, "run", fn=train_and_report, arguments=saves, is_shared=is_shared, kills=[(10, 2)]
    )
    result = handle.result(240)
    assert result.return_value["steps"] == 16
    assert len(list((cloud.marks / "run").glob("resumed-*"))) == 4
    assert result.metrics is not None
    assert result.checkpoint is not None
    assert result.metrics["step"] == 16
    assert {"eval_loss", "loss", "epoch"} <= result.metrics.keys()
    with result.checkpoint.as_directory() as folder:
        files = {path.name for path in Path(folder, "checkpoint").iterdir()}
    assert {"config.json", "model.safetensors", "optimizer.pt", "trainer_state.json"} <= files
    assert {f"rng_state_{rank}.pth" for rank in range(4)} <= files


def make_trainer(config: Config) -> Any:
    marks = Path(config["marks"])
    return Trainer(
        model=tiny_bert(),
        args=arguments(marks, {"arguments": {"max_steps": 3, "eval_strategy": "no"}}),
        train_dataset=Digits(slice(64)),
    )


@pytest.mark.timeout(300)
def test_a_checkpoint_is_exported_for_from_pretrained(cloud: LiveTestCloud, tmp_path: Path) -> None:
    """Of a TransformersTrainer, whose function returns the Trainer."""
    result = cloud.fit(make_trainer, workers=2, trainer_type=TransformersTrainer)
    assert result.return_value["global_step"] == 3
    assert result.checkpoint is not None
    export_pretrained(result.checkpoint, tmp_path / "model")
    model = BertForSequenceClassification.from_pretrained(tmp_path / "model")
    export_checkpoint(result.checkpoint, tmp_path / "weights.pt")
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(torch.equal(weights[name], one) for name, one in model.state_dict().items())
    assert model.config.num_labels == 10


@contextmanager
def a_session() -> Iterator[None]:
    torch.set_num_threads(1)  # as in workers; threads of a tiny model only wait for each other
    session = LocalSession("run")
    with training_api.use_session(session):
        yield
    shutil.rmtree(session.snapshot_channel.segment_dirs[0].parent, ignore_errors=True)


@pytest.fixture
def local_session() -> Iterator[None]:
    with a_session():
        yield


def local_trainer(tmp_path: Path, **options: Any) -> Any:
    return Trainer(
        model=tiny_bert(),
        args=arguments(tmp_path, {"arguments": {"max_steps": 2, "eval_strategy": "no", **options}}),
        train_dataset=Digits(slice(64)),
    )


class Stop(TrainerCallback):
    """Raises KeyboardInterrupt when a step begins, as Ctrl-C in local mode does."""

    def __init__(self, at: int) -> None:
        self._at = at

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._at:
            raise KeyboardInterrupt


Data = tuple[Digits, Digits]


@pytest.fixture(scope="module")
def data() -> Data:
    """Samples to train on and to evaluate with."""
    return Digits(slice(60)), Digits(slice(600, 620))


def train_locally(folder: Path, case: Config, data: Data, *, stops_at: int) -> Any:
    """Return what must not change; None if the training was interrupted."""
    begin_next_process()
    patience = EarlyStoppingCallback(case.get("patience", 100))
    trainer = Trainer(
        model=tiny_bert(),
        args=arguments(folder, {"arguments": {"logging_steps": 3, **case["arguments"]}}),
        train_dataset=data[0],
        eval_dataset=data[1],
        callbacks=[patience, Stop(stops_at)],
    )
    try:
        result = prepare_trainer(trainer, every=case.get("every", 1)).train()
    except KeyboardInterrupt:
        return None
    log = without_durations(trainer.state.log_history)
    return digest_of(trainer.model), result.training_loss, log, trainer.state.total_flos


NEVER = -1
# Without learning the evaluation does not improve.
STOPS_EARLY = {"learning_rate": 0.0, "eval_strategy": "steps", "eval_steps": 2}
BY_LENGTH = {"train_sampling_strategy": "group_by_length", "length_column_name": "labels"}
PERSISTENT_WORKERS = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
EVALUATES_FIRST = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2}


# Tests of tables have imported lance, whose warning concerns its use in forked loader processes.
@pytest.mark.filterwarnings("ignore:lance is not fork-safe")
@pytest.mark.parametrize(
    ("case", "stops"),
    [
        ({"arguments": {}}, [1, 8]),
        ({"arguments": {}, "every": "epoch"}, [12]),
        ({"arguments": {"gradient_accumulation_steps": 3}}, [2, 3]),
        ({"arguments": {"max_steps": 11}}, [9]),
        ({"arguments": EVALUATES_FIRST}, [3]),
        ({"arguments": BY_LENGTH}, [3, 10]),
        ({"arguments": {"dataloader_num_workers": 1}}, [3]),
        ({"arguments": PERSISTENT_WORKERS}, [5, 8]),
        ({"arguments": {"accelerator_config": {"use_seedable_sampler": False}}}, [10]),
        ({"arguments": STOPS_EARLY, "patience": 2}, [4]),
    ],
    ids=str,
)
def test_a_restart_after_a_step_changes_nothing(
    case: Config, stops: list[int], data: Data, tmp_path: Path
) -> None:
    base = {"num_train_epochs": 2, "metric_for_best_model": "loss"}
    case = {**case, "arguments": {**base, **case["arguments"]}}
    with a_session():
        undisturbed = train_locally(tmp_path, case, data, stops_at=NEVER)
    for step in stops:
        with a_session():
            assert train_locally(tmp_path, case, data, stops_at=step) is None
            assert train_locally(tmp_path, case, data, stops_at=NEVER) == undisturbed, step


@pytest.mark.usefixtures("local_session")
def test_skipped_batches_are_not_read(data: Data, tmp_path: Path) -> None:
    arguments = {
        "num_train_epochs": 1,
        "dataloader_drop_last": True,
        "metric_for_best_model": "loss",
    }
    case: Config = {"arguments": arguments}
    recorded = Digits(slice(60), tmp_path / "reads")
    assert train_locally(tmp_path, case, (recorded, data[1]), stops_at=5) is None
    assert len((tmp_path / "reads").read_text().split()) == 7 * 8, "one batch ahead"
    (tmp_path / "reads").write_text("")
    assert train_locally(tmp_path, case, (recorded, data[1]), stops_at=NEVER) is not None
    assert len((tmp_path / "reads").read_text().split()) == 2 * 8, "of seven, five were trained on"


@pytest.mark.usefixtures("local_session")
def test_an_epoch_begins_again_on_request(data: Data, tmp_path: Path) -> None:
    """With ignore_data_skip, for datasets that are slow to skip."""
    options = {"max_steps": 16, "ignore_data_skip": True, "metric_for_best_model": "loss"}
    case: Config = {"arguments": options}
    assert train_locally(tmp_path, case, data, stops_at=5) is None
    _, _, log, _ = train_locally(tmp_path, case, data, stops_at=NEVER)
    evaluated_at = [entry["step"] for entry in log if "eval_loss" in entry]
    assert (evaluated_at, log[-1]["step"]) == ([13, 16], 16)


@pytest.mark.usefixtures("local_session")
def test_a_path_to_resume_from_is_rejected(tmp_path: Path) -> None:
    trainer = prepare_trainer(local_trainer(tmp_path), every="auto")
    with pytest.raises(spotfit.ConfigError, match="conflicts with prepare_trainer") as caught:
        trainer.train(resume_from_checkpoint="checkpoint-5")
    assert is_permanent_error(caught.value)


@pytest.mark.usefixtures("local_session")
@pytest.mark.parametrize("what", ["auto_find_batch_size", "every", "another number", "trainer"])
def test_unsupported_options_are_rejected(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = local_trainer(tmp_path, auto_find_batch_size=what == "auto_find_batch_size")
    outlook = GroupOutlook(allows_resize=what == "another number")
    monkeypatch.setattr(LocalSnapshotChannel, "outlook", lambda _: outlook)
    every: Any = "sometimes" if what == "every" else 5
    with pytest.raises(spotfit.ConfigError, match=what) as caught:
        prepare_trainer(
            trainer, every=every, extra={"trainer": tiny_bert()} if what == "trainer" else {}
        )
    assert is_permanent_error(caught.value)
    assert type(trainer) is Trainer


def test_saves_need_a_training_function_and_a_plain_preparation_does_not(tmp_path: Path) -> None:
    trainer = local_trainer(tmp_path)
    assert prepare_trainer(trainer) is trainer
    assert type(trainer) is Trainer
    with pytest.raises(spotfit.SessionMisuseError, match="prepare_trainer"):
        prepare_trainer(trainer, every="epoch")


class Batches:
    """An iterable of batches, as `iter_torch_batches` of Ray Data returns it."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        data = Digits(slice(12))
        for start in (0, 6):
            samples = [data[index] for index in range(start, start + 6)]
            yield {name: torch.stack([one[name] for one in samples]) for name in samples[0]}


def test_an_iterable_of_batches_is_read_as_it_is(tmp_path: Path) -> None:
    trainer = Trainer(
        model=tiny_bert(),
        args=arguments(tmp_path, {"arguments": {"max_steps": 3, "eval_strategy": "no"}}),
        train_dataset=Batches(),
    )
    loader = prepare_trainer(trainer).get_train_dataloader()
    assert [len(batch["labels"]) for batch in loader] == [6, 6]
    assert trainer.train().global_step == 3


ROWS = 55
"""Rows of a shard with six batches, of which the last one has half of the rows."""


class Mean(torch.nn.Module):
    """Records the first row of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.first_rows: list[int] = []

    def forward(self, x: torch.Tensor) -> Config:
        self.first_rows.append(int(x[0]))
        return {"loss": self.linear(x.float()[:, None]).square().mean()}


class Steps(TrainerCallback):
    """Records the first rows of the batches of each step, and the epoch that it has reached.

    Stops with the first checkpoint, for which it stores the position of `shard` as a report does.
    """

    def __init__(self, shard: DataIterator | None = None) -> None:
        self._shard = shard
        self.position: Config = {}
        self.all: list[tuple[list[int], float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rows = kwargs["model"].first_rows
        self.all.append((rows[:], state.epoch))
        rows.clear()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._shard is not None:
            self._shard.position.count()
            self.position = self._shard.position.state()
            control.should_training_stop = True


def open_shard(position: Config) -> DataIterator:
    """Return the shard of a worker that has asked for the checkpoint with this position."""
    dataset = spotfit.data.range(ROWS).rename_columns({"id": "x"})
    return DataIterator(ShardPosition(dataset, ShardGroup(seed=1), restore=lambda: position))


def shard_trainer(folder: Path, shard: DataIterator, options: Config, *callbacks: Any) -> Any:
    base = {"eval_strategy": "no", "logging_strategy": "no"}
    return Trainer(
        model=Mean(),
        args=arguments(folder, {"arguments": {**base, **options}}),
        train_dataset=shard.iter_torch_batches(batch_size=10),
        callbacks=list(callbacks),
    )


SHARD_OPTIONS: list[Config] = [
    {"max_steps": 14},
    {"max_steps": 8, "gradient_accumulation_steps": 2},
    {"max_steps": 14, "ignore_data_skip": True},
]


@pytest.mark.parametrize("options", SHARD_OPTIONS, ids=str)
@pytest.mark.parametrize("saves_at", [2, 5, 7, "epoch"])
def test_a_shard_continues_where_the_checkpoint_of_a_trainer_was_saved(
    tmp_path: Path, options: Config, saves_at: int | str
) -> None:
    if saves_at == "epoch":
        how: Config = {"save_strategy": "epoch"}
    else:
        how = {"save_strategy": "steps", "save_steps": saves_at}
    whole, shard = Steps(), open_shard({})
    prepare_trainer(shard_trainer(tmp_path, open_shard({}), options, whole)).train()
    first, second = Steps(shard), Steps()
    prepare_trainer(shard_trainer(tmp_path, shard, {**options, **how}, first)).train()
    resumed = shard_trainer(tmp_path, open_shard(first.position), options, second)
    (checkpoint,) = (tmp_path / "output").glob("checkpoint-*")
    prepare_trainer(resumed).train(resume_from_checkpoint=str(checkpoint))
    assert first.all + second.all == whole.all


def test_a_shard_from_its_begin_is_read_up_to_the_place(tmp_path: Path) -> None:
    """As with any dataset, if the training function has not asked for the run's checkpoint."""
    how: Config = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    shard = open_shard({})
    prepare_trainer(shard_trainer(tmp_path, shard, how, Steps(shard))).train()
    steps = Steps()
    trainer = prepare_trainer(shard_trainer(tmp_path, open_shard({}), {"max_steps": 5}, steps))
    trainer.train(resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-2"))
    assert [rows for rows, _ in steps.all] == [[20], [30], [40]]


def train_on_shard(folder: Path, options: Config, every: Any, *, stops_at: int) -> Steps:
    shard, steps = spotfit.get_dataset_shard("train"), Steps()
    trainer = shard_trainer(folder, shard, options, steps, Stop(stops_at))
    with suppress(KeyboardInterrupt):
        prepare_trainer(trainer, every=every).train()
    return steps


def use_new_process(channel: Any = None) -> LocalSession:
    """Begin a session with the dataset, and with the snapshots of an earlier one."""
    datasets = {"train": spotfit.data.range(ROWS).rename_columns({"id": "x"})}
    session = LocalSession("run", datasets=datasets, dataset_config=spotfit.DataConfig())
    if channel is not None:
        session.snapshot_channel = channel
    training_api.set_session(session)
    begin_next_process()
    return session


@pytest.mark.parametrize("options", SHARD_OPTIONS, ids=str)
@pytest.mark.parametrize("every", [1, "epoch"])
@pytest.mark.usefixtures("local_session")
def test_a_shard_continues_where_a_snapshot_was_saved(
    tmp_path: Path, options: Config, every: Any
) -> None:
    use_new_process()
    whole = train_on_shard(tmp_path, options, every, stops_at=NEVER).all
    for step in (2, 5, 7):
        session = use_new_process()
        train_on_shard(tmp_path, options, every, stops_at=step)
        use_new_process(session.snapshot_channel)
        resumed = train_on_shard(tmp_path, options, every, stops_at=NEVER).all
        saved = step if every == 1 else _ends_of_epochs(whole, step)
        assert resumed == whole[saved:], step


@pytest.mark.parametrize("every", [1, "epoch"])
@pytest.mark.usefixtures("local_session")
def test_gradients_accumulated_at_the_end_of_an_epoch_are_part_of_the_next_step(
    tmp_path: Path, every: Any
) -> None:
    """A shard, whose length the Trainer does not know, has six batches: a step and half a step."""
    options = {"max_steps": 5, "gradient_accumulation_steps": 4}

    def weights_of(stops_at: int) -> list[float]:
        torch.manual_seed(0)
        trainer = shard_trainer(
            tmp_path, spotfit.get_dataset_shard("train"), options, Stop(stops_at)
        )
        with suppress(KeyboardInterrupt):
            prepare_trainer(trainer, every=every).train()
        return [value for one in trainer.model.parameters() for value in one.flatten().tolist()]

    use_new_process()
    undisturbed = weights_of(NEVER)
    for step in (1, 2, 3):
        session = use_new_process()
        assert weights_of(step) != undisturbed
        use_new_process(session.snapshot_channel)
        assert weights_of(NEVER) == undisturbed, step


def _ends_of_epochs(steps: list[tuple[list[int], float]], limit: int) -> int:
    """Return the number of steps before the last epoch that has begun within `limit` steps."""
    return max(n for n in range(limit + 1) if n == 0 or int(steps[n][1]) > int(steps[n - 1][1]))


def test_the_names_of_ray_train_have_its_parameters() -> None:
    """Those of ray.train.huggingface.transformers 2.60: further ones are optional."""
    import spotfit.huggingface.transformers as names

    assert names.__all__ == ["RayTrainReportCallback", "prepare_trainer"]
    trainer, *further = inspect.signature(names.prepare_trainer).parameters.values()
    assert trainer.name == "trainer"
    assert all(one.default is not inspect.Parameter.empty for one in further)
    callback = names.RayTrainReportCallback()
    assert isinstance(callback, TrainerCallback)
    assert callback.CHECKPOINT_NAME == "checkpoint"
    assert list(inspect.signature(callback.on_save).parameters) == [
        *("args", "state", "control", "kwargs")
    ]
