"""Engines of DeepSpeed in a process group of one process, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spotfit.deepspeed import initialize
from spotfit.frameworks.torch.deepspeed_ops import import_deepspeed


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process. One for all tests: DeepSpeed keeps the first group of a process."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class SmallModel(nn.Module):
    """Trained and frozen weights, dropout, and a running mean of float32."""

    mean: torch.Tensor

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, width)
        self.frozen.requires_grad_(requires_grad=False)
        self.body = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(width, width)
        self.tied = self.head  # a second name of its weights
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(self.frozen(x))
        self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
        scores: torch.Tensor = self.head(self.dropout(x - self.mean.to(x.dtype)))
        return scores


def make_engine(stage: int, *, model: nn.Module | None = None, **config: Any) -> Any:
    """Return an engine for `SmallModel`; `config` replaces parts of its configuration."""
    torch.manual_seed(5)
    model = model or SmallModel()
    engine, *_ = initialize(
        model=model,
        model_parameters=[one for one in model.parameters() if one.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "Adam", "params": {"lr": 0.05, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}},
            # Small, so that ZeRO 3 partitions some weights and gathers others.
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 5},
            **config,
        },
    )
    return engine


def train_batch(engine: Any) -> None:
    """Train one batch of random numbers."""
    batch = torch.randn(8, 4, dtype=engine.get_data_types()[0])
    loss = engine(batch).float().square().mean()
    engine.backward(loss)
    engine.step()


def everything(engine: Any) -> list[float]:
    """Return all weights, buffers, the learning rate and the counters of the engine."""
    deepspeed = import_deepspeed()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        tensors = [*engine.module.parameters(), *engine.module.buffers()]
        weights = torch.cat([one.detach().float().flatten() for one in tensors]).tolist()
    return [*weights, *engine.get_lr(), engine.global_steps, engine.global_samples]
