"""torch in two real processes: prepared models train to the same weights as in one process."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spotfit
from spotfit.client.trainer import TorchTrainer
from spotfit.torch import get_device, prepare_data_loader, prepare_model
from tests.live.cloud import LiveTestCloud

Trained = list[list[float]]
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")


class Layer(nn.Linear):
    """A class for the wrap policy; two of them make a model."""


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(4, 8), nn.Tanh(), Layer(8, 2))


def pairs() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = (
        torch.rand(16, 4, generator=generator),
        torch.randint(2, (16,), generator=generator),
    )
    return TensorDataset(inputs, labels)


def trained(model: nn.Module, loader: DataLoader[Any]) -> Trained:
    """Return the unsharded weights after two epochs."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, labels in loader:
            loss: Any = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    weights: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True)
    )
    return [weight.flatten().tolist() for weight in weights.values()]


def in_order() -> DataLoader[Any]:
    """With batches of four, two workers together read the batches of eight of a single one."""
    return DataLoader(pairs(), batch_size=4, num_workers=1, persistent_workers=True)


def train_in_a_group() -> dict[str, Any]:
    loader = prepare_data_loader(in_order())
    blocks = {"auto_wrap_policy": {Layer}}
    sharded = prepare_model(
        plain_model(), parallel_strategy="fsdp2", parallel_strategy_kwargs=blocks
    )
    shard: Any = next(sharded.parameters())
    try:
        prepare_model(plain_model(), parallel_strategy="fsdp")
        fsdp_error = ""
    except spotfit.ConfigError as error:
        fsdp_error = str(error)
    return {
        "ddp": trained(prepare_model(plain_model()), loader),
        "fsdp2": trained(sharded, loader),
        "shard": list(shard.to_local().shape),
        "fsdp": fsdp_error,
        "ranks": {name: os.environ[name] for name in RANKS},
        "address": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        "device": (str(get_device()), os.environ["ACCELERATE_TORCH_DEVICE"]),
        "backend": dist.get_backend(),
        "is_same_rank": dist.get_rank() == spotfit.get_context().get_world_rank(),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests machines without a GPU")
def test_two_workers_train_to_the_weights_of_one(cloud: LiveTestCloud) -> None:
    result = cloud.fit(train_in_a_group, workers=2, nodes=2, trainer_type=TorchTrainer).return_value

    expected = trained(plain_model(), DataLoader(pairs(), batch_size=8))
    for strategy in ("ddp", "fsdp2"):
        for weights, expected_weights in zip(result[strategy], expected, strict=True):
            assert weights == pytest.approx(expected_weights, abs=1e-4)
    assert result["shard"] == [4, 4], "half of the first layer's 8 rows"
    assert "only available with GPU" in result["fsdp"]
    assert result["ranks"] == dict(zip(RANKS, ("0", "0", "2", "1", "0"), strict=True))
    assert re.fullmatch(r"127\.[\d.]+:\d+", result["address"])
    assert result["device"] == ("cpu", "cpu")
    assert result["backend"] == "gloo"
    assert result["is_same_rank"]


KILLED_RANKS = (0, 2, 1, 2, 0, 1)
"""By attempt, the rank that is killed while the others are in a collective."""


def reduce_until_a_rank_is_killed(config: dict[str, Any]) -> None:
    attempts = Path(config["marks"], "attempts")
    attempt = attempts.stat().st_size if attempts.exists() else 0
    dist.barrier()
    if dist.get_rank() == 0:
        with attempts.open("a") as file:
            file.write("x")
    for step in range(20):
        is_killed = attempt < len(KILLED_RANKS) and KILLED_RANKS[attempt] == dist.get_rank()
        if step == 10 and is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(100_000))


def test_the_cause_of_a_failed_round_is_the_killed_rank(cloud: LiveTestCloud) -> None:
    cloud.fit(
        reduce_until_a_rank_is_killed,
        workers=3,
        nodes=2,
        max_failures=len(KILLED_RANKS),
        trainer_type=TorchTrainer,
    )
    reasons = [closed.reason.partition(":")[0] for closed in cloud.rounds_closed()]
    assert reasons == [f"rank {rank} died" for rank in KILLED_RANKS]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests machines without a GPU")
def test_gpus_that_this_machine_lacks_are_rejected_before_the_run(
    cold_cloud: LiveTestCloud,
) -> None:
    with pytest.raises(spotfit.ConfigError, match="1 GPUs each on one node; this machine has 0"):
        cold_cloud.fit(print, scaling_options={"use_gpu": True}, trainer_type=TorchTrainer)
    assert cold_cloud.is_untouched


def test_a_worker_sees_only_the_gpu_it_requested(
    cloud: LiveTestCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_DEVICES", "cuda:4,cuda:5")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def train(config: dict[str, Any]) -> None:
        mark = Path(config["marks"], str(spotfit.get_context().get_world_rank()))
        mark.write_text(os.environ["CUDA_VISIBLE_DEVICES"])

    cloud.fit(train, workers=2, scaling_options={"use_gpu": True})
    assert [(cloud.marks / rank).read_text() for rank in "01"] == ["4", "5"]
