"""Hugging Face Accelerate: its wrappers in a Checkpointer, and the state of an Accelerator."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import spotfit
from spotfit.torch import Checkpointer, TorchTrainer
from spotfit.torch.checkpoint.data_position import (
    LoaderPosition,
    SamplerPosition,
    track_data_position,
)
from tests.live.cloud import LiveTestCloud

pytest.importorskip("accelerate")

from accelerate.data_loader import DataLoaderDispatcher, prepare_data_loader

EPOCHS = 2
SAMPLES = 96
Config = dict[str, Any]


def prepared(
    rank: int, ranks: int, samples: int, *, seed: int | None = 3, batch_size: int = 3, **how: Any
) -> Any:
    """Return the loader that Accelerate prepares for this rank; `seed` None does not shuffle."""
    torch.manual_seed(seed or 0)
    data = TensorDataset(torch.arange(samples))
    drop_last = how.pop("drop_last", False)
    loader: DataLoader[Any] = DataLoader(
        data, batch_size=batch_size, shuffle=seed is not None, drop_last=drop_last
    )
    options: dict[str, Any] = {"put_on_device": False, "use_seedable_sampler": True, **how}
    return prepare_data_loader(loader, num_processes=ranks, process_index=rank, **options)


def tracked(loader: Any, ranks: int) -> SamplerPosition:
    position = track_data_position(loader, world_size=ranks)
    assert isinstance(position, SamplerPosition)
    return position


def batches_of(loader: Any) -> Iterator[list[int]]:
    for (batch,) in loader:
        yield batch.tolist()


def trained_batches(loader: Any, position: SamplerPosition, epochs: int) -> Iterator[list[int]]:
    """Yield the batches of this rank; each counts when the next one is asked for."""
    while position.epoch < epochs:
        for batch in batches_of(loader):
            yield batch
            position.advance()


LAYOUTS = [
    {"drop_last": drop_last, "even_batches": even, "split_batches": split}
    for drop_last, even, split in itertools.product((False, True), repeat=3)
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("samples", [2, 24, 25, 29, 31])
def test_each_rank_reads_the_batches_that_accelerate_gives_it(
    layout: dict[str, bool], samples: int
) -> None:
    """In the order of Accelerate's seedable sampler, in every epoch and with its padding."""
    for rank, ranks in [(0, 2), (1, 2), (0, 4), (3, 4)]:
        size = {"batch_size": 8} if layout["split_batches"] else {}
        plain = prepared(rank, ranks, samples, **layout, **size)
        loader = prepared(rank, ranks, samples, **layout, **size)
        position = tracked(loader, ranks)
        for epoch in range(EPOCHS):
            expected = list(batches_of(plain))
            assert position.batches_per_epoch == len(expected)
            actual = []
            for batch in batches_of(loader):
                actual.append(batch)
                assert position.advance() == (len(actual) == len(expected))
            assert actual == expected
            assert (position.epoch, position.consumed) == (epoch + 1, 0)


@pytest.mark.parametrize("seedable", [True, False])
@pytest.mark.parametrize("stop", [1, 3, 4, 5, 8])
def test_a_resumed_rank_reads_the_rest_of_its_batches(stop: int, seedable: bool) -> None:
    """An epoch has four batches per rank, of which the last is padded."""
    how = {"use_seedable_sampler": seedable}
    for rank in (0, 2):
        undisturbed = prepared(rank, 3, 34, **how)
        expected = list(trained_batches(undisturbed, tracked(undisturbed, 3), EPOCHS))
        before = prepared(rank, 3, 34, **how)
        position = tracked(before, 3)
        trained = list(itertools.islice(trained_batches(before, position, EPOCHS), stop + 1))[:stop]
        after = prepared(rank, 3, 34, seed=99, **how)
        resumed = tracked(after, 3)
        resumed.resume(position.epoch, position.consumed, position.rank_state())
        assert after.iteration == position.epoch
        assert trained + list(trained_batches(after, resumed, EPOCHS)) == expected


def test_a_resized_group_divides_the_rest_of_the_epoch() -> None:
    """Three ranks train two batches each; then two ranks read what is left of 30 samples."""
    trained: list[int] = []
    states = []
    positions = set()
    for rank in range(3):
        loader = prepared(rank, 3, 30)
        position = tracked(loader, 3)
        for batch in itertools.islice(batches_of(loader), 2):
            trained += batch
            position.advance()
        states.append(position.rank_state())
        positions.add((position.epoch, position.consumed))
    assert positions == {(0, 18)}
    for rank in range(2):
        loader = prepared(rank, 2, 30)
        position = tracked(loader, 2)
        assert not position.is_bound_to_world_size
        position.reject_resize(states)
        position.resume_resized(0, 18, states)
        trained += itertools.chain.from_iterable(batches_of(loader))
    assert sorted(trained) == list(range(30))


def test_a_loader_that_is_not_shuffled_keeps_its_order() -> None:
    loader = prepared(1, 2, 12, seed=None)
    position = tracked(loader, 2)
    assert list(trained_batches(loader, position, 1)) == [[3, 4, 5], [9, 10, 11]]


@pytest.mark.parametrize("kind", ["dispatched", "sharded twice"])
def test_loaders_with_an_unknown_order_are_logged(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = TensorDataset(torch.arange(8))
    sampler: DistributedSampler[Any] = DistributedSampler(data, 2, 0)
    loader: Any = prepare_data_loader(
        DataLoader(data, sampler=sampler), num_processes=2, process_index=0, put_on_device=False
    )
    if kind == "dispatched":
        loader = DataLoaderDispatcher(data, batch_size=2)
    assert isinstance(track_data_position(loader, world_size=2), LoaderPosition)
    assert "checkpoint.data_position_unknown" in caplog.messages


def prepare(rank: int, *, dropout: float, workers: int) -> Config:
    """Return what a script with Accelerate trains, on samples that contain their number."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
    )
    module = nn.Sequential(nn.Linear(8, 32), nn.Dropout(dropout), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    numbers = torch.arange(SAMPLES)
    data = TensorDataset(numbers, (numbers / SAMPLES).unsqueeze(1).expand(-1, 8))
    torch.manual_seed(rank)  # the ranks' own loaders would have different orders
    loader: DataLoader[Any] = DataLoader(data, batch_size=12 // workers, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3 * workers, gamma=0.5)
    names = ("model", "optimizer", "scheduler", "loader")
    prepared = accelerator.prepare(module, optimizer, scheduler, loader)
    return {"accelerator": accelerator, **dict(zip(names, prepared, strict=True))}


def train_step(state: Config, inputs: torch.Tensor) -> None:
    loss = (state["model"](inputs) - inputs.mean(1, keepdim=True)).square().mean()
    state["accelerator"].backward(loss)
    state["optimizer"].step()
    state["scheduler"].step()
    state["optimizer"].zero_grad()


def weights_of(state: Config) -> list[float]:
    module = state["accelerator"].unwrap_model(state["model"])
    return torch.cat([weight.flatten() for weight in module.state_dict().values()]).tolist()


def interrupt_at(step: int, rank: int, config: Config) -> None:
    """Stop by an error, or once by a signal; `kills` are pairs of a step and a rank."""
    mark = Path(config["marks"], f"killed-{step}-{rank}")
    if (step, rank) in config.get("kills", []) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if step == config.get("stops_at"):
        raise RuntimeError("stopped")


def train_with_checkpointer(config: Config) -> list[float]:
    """Train two epochs of eight steps without a Trainer; write down each rank's samples."""
    context = spotfit.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    state = prepare(rank, dropout=config["dropout"], workers=workers)
    ckpt = Checkpointer(
        model=state["model"],
        optimizer=state["optimizer"],
        scheduler=state["scheduler"],
        loader=state["loader"],
        every=3,
    )
    restored = ckpt.restore()
    for epoch in range(restored.epoch if restored else 0, EPOCHS):
        for numbers, inputs in state["loader"]:
            train_step(state, inputs)
            samples = Path(config["marks"], f"{config['label']}-{epoch}-{ckpt.steps}-{rank}")
            samples.write_text(" ".join(map(str, numbers.tolist())))
            ckpt.step()
            interrupt_at(ckpt.steps, rank, config)
    return weights_of(state)


def fit(cloud: LiveTestCloud, name: str, *, fn: Any, workers: int = 4, **config: Any) -> Any:
    options: Config = {"workers": workers, "nodes": 2, "name": config.pop("run", name)}
    return cloud.fit(
        fn,
        trainer_type=TorchTrainer,
        max_failures=len(config.get("kills", [])),
        config={"label": name, "dropout": 0.1, **config},
        **options,
    ).return_value


def trained_samples(cloud: LiveTestCloud, name: str, epoch: int, steps: range) -> Counter[str]:
    files = [path for step in steps for path in cloud.marks.glob(f"{name}-{epoch}-{step}-*")]
    return Counter(number for path in files for number in path.read_text().split())


@pytest.mark.timeout(300)
def test_killed_workers_do_not_change_a_script_with_accelerate(cloud: LiveTestCloud) -> None:
    undisturbed = fit(cloud, "undisturbed", fn=train_with_checkpointer)
    killed = fit(cloud, "killed", fn=train_with_checkpointer, kills=[(4, 1), (11, 0)])
    assert len(cloud.rounds_opened("killed")) == 3
    assert killed == undisturbed
    for epoch in range(EPOCHS):
        trained = trained_samples(cloud, "undisturbed", epoch, range(2 * SAMPLES))
        assert trained == Counter(str(number) for number in range(SAMPLES))


@pytest.mark.timeout(300)
def test_a_resized_group_trains_on_each_sample_once(cloud: LiveTestCloud) -> None:
    """Four ranks save three of eight steps, then two ranks read the rest of the epoch."""
    options: Config = {"fn": train_with_checkpointer, "run": "run", "dropout": 0.0}
    with pytest.raises(spotfit.WorkerGroupError, match="stopped"):
        fit(cloud, "four", stops_at=4, **options)
    fit(cloud, "two", workers=2, **options)
    first_epoch = trained_samples(cloud, "four", 0, range(3))
    first_epoch += trained_samples(cloud, "two", 0, range(3, 8))
    second_epoch = trained_samples(cloud, "two", 1, range(8, 16))
    each_once = Counter(str(number) for number in range(SAMPLES))
    assert (first_epoch, second_epoch) == (each_once, each_once)


class Progress:
    """Steps that were trained, as an object for `register_for_checkpointing`."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def train_with_save_state(config: Config) -> list[float]:
    """Train on one sample per step, and save by Accelerate's own format every four steps."""
    from spotfit.huggingface.accelerate import load_state, save_state

    rank = spotfit.get_context().get_world_rank()
    state = prepare(rank, dropout=config["dropout"], workers=4)
    progress = Progress()
    state["accelerator"].register_for_checkpointing(progress)
    if load_state(state["accelerator"]):
        Path(config["marks"], f"resumed-{rank}").write_text(str(progress.steps))
    while progress.steps < 10:
        train_step(state, torch.rand(4, 8))
        progress.steps += 1
        if progress.steps % 4 == 0:
            save_state(state["accelerator"], {"steps": progress.steps})
            spotfit.get_all_reported_checkpoints()  # waits for the upload
        interrupt_at(progress.steps, rank, config)
    return weights_of(state)


@pytest.mark.timeout(300)
def test_the_state_of_an_accelerator_is_a_checkpoint(cloud: LiveTestCloud) -> None:
    """With the RNG state of every rank: dropout and inputs are the same after a restart."""
    undisturbed = fit(cloud, "undisturbed", fn=train_with_save_state)
    killed = fit(cloud, "killed", fn=train_with_save_state, kills=[(9, 2)])
    assert [path.read_text() for path in cloud.marks.glob("resumed-*")] == ["8"] * 4
    assert killed == undisturbed
    files = {path.name for path in Path(cloud.storage, "killed").glob("*/*")}
    assert {"model.safetensors", "optimizer.bin", "scheduler.bin"} <= files
    assert {f"random_states_{rank}.pkl" for rank in range(4)} <= files
