"""torch in two real processes: what is prepared there trains as one process alone would."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spotfit
from spotfit.client.trainers import TorchTrainer
from spotfit.torch import get_device, prepare_data_loader, prepare_model
from tests.live.cloud import Cloud

Trained = list[list[float]]
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")


class Layer(nn.Linear):
    """Two of them make a model."""


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(4, 8), nn.Tanh(), Layer(8, 2))


def pairs() -> TensorDataset:
    dice = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(16, 4, generator=dice), torch.randint(2, (16,), generator=dice))


def trained(model: nn.Module, loader: DataLoader[Any]) -> Trained:
    """The weights after two epochs, whole."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, wanted in loader:
            loss: Any = nn.functional.cross_entropy(model(inputs), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    whole: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True)
    )
    return [weight.flatten().tolist() for weight in whole.values()]


def in_order() -> DataLoader[Any]:
    """Read in turn by two workers, four at a time are the eight that one reads."""
    return DataLoader(pairs(), batch_size=4, num_workers=1, persistent_workers=True)


def in_a_group() -> dict[str, Any]:
    loader = prepare_data_loader(in_order())
    blocks = {"auto_wrap_policy": {Layer}}
    sharded = prepare_model(
        plain_model(), parallel_strategy="fsdp2", parallel_strategy_kwargs=blocks
    )
    share: Any = next(sharded.parameters())
    try:
        prepare_model(plain_model(), parallel_strategy="fsdp")
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    return {
        "ddp": trained(prepare_model(plain_model()), loader),
        "fsdp2": trained(sharded, loader),
        "share": list(share.to_local().shape),
        "fsdp": refused,
        "told": {name: os.environ[name] for name in RANKS},
        "meets at": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        "device": (str(get_device()), os.environ["ACCELERATE_TORCH_DEVICE"]),
        "backend": dist.get_backend(),
        "rank": dist.get_rank() == spotfit.get_context().get_world_rank(),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_two_workers_train_as_one_would(cloud: Cloud) -> None:
    told = cloud.fit(in_a_group, workers=2, nodes=2, kind=TorchTrainer).return_value

    alone = trained(plain_model(), DataLoader(pairs(), batch_size=8))
    for strategy in ("ddp", "fsdp2"):
        for mine, theirs in zip(told[strategy], alone, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
    assert told["share"] == [4, 4], "half of the first layer's 8 rows"
    assert "only available with GPU" in told["fsdp"]
    assert told["told"] == dict(zip(RANKS, ("0", "0", "2", "1", "0"), strict=True))
    assert re.fullmatch(r"127\.[\d.]+:\d+", told["meets at"])
    assert told["device"] == ("cpu", "cpu")
    assert told["backend"] == "gloo"
    assert told["rank"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_machine_without_the_gpu_that_was_asked_for_is_tried_once(cloud: Cloud) -> None:
    with pytest.raises(spotfit.WorkerGroupError) as caught:
        cloud.fit(print, scaling={"use_gpu": True}, kind=TorchTrainer, max_failures=3)
    assert "asked for 1 GPU; its node has none" in str(caught.value)
    assert isinstance(caught.value.worker_failures[0], spotfit.ConfigError)


def test_a_worker_is_shown_the_gpu_it_asked_for(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_DEVICES", "cuda:4,cuda:5")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def train(config: dict[str, Any]) -> None:
        mark = Path(config["marks"], str(spotfit.get_context().get_world_rank()))
        mark.write_text(os.environ["CUDA_VISIBLE_DEVICES"])

    cloud.fit(train, workers=2, scaling={"use_gpu": True})
    assert [(cloud.marks / rank).read_text() for rank in "01"] == ["4", "5"]
