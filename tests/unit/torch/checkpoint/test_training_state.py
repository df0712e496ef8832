"""TrainingState: tensors by name, other values unchanged, and the RNG states."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from spotfit.checkpoint.base_checkpointer import load_object_state
from spotfit.core.errors import ConfigError
from spotfit.torch.checkpoint.save_plan import encode_values
from spotfit.torch.checkpoint.training_state import (
    OpaqueValue,
    TrainingState,
    copy_containers,
    extract_tensors,
    gpu_in_use,
    insert_tensors,
    rng_state,
    set_rng_state,
)


def trained(lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_weights_and_optimizer_state_are_keyed_by_name() -> None:
    model, optimizer = trained()
    state = TrainingState(model, [optimizer]).state_dict()
    assert state["model"]["weight"].data_ptr() == next(model.parameters()).data_ptr()
    assert state["optimizer"]["state"]["weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_buffers_are_unsynchronized() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model.register_buffer("none", torch.empty(0))
    training = TrainingState(model)
    means = {f"model.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert training.unsynchronized_names(training.state_dict()) == means


class Holder:
    def __init__(self, count: int) -> None:
        self.held = torch.zeros(count)

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held, "name": "it"}


def test_small_objects_are_unsynchronized() -> None:
    """Large objects are written by all ranks together, so they must be equal."""
    training = TrainingState(nn.Linear(1, 1), (), {"small": Holder(9), "big": Holder(2**20)})
    unsynchronized = training.unsynchronized_names(training.state_dict())
    assert unsynchronized == {
        "stateful_objects.small.structure",
        "stateful_objects.small.tensors./held",
    }


def test_a_model_without_weights_has_an_empty_state() -> None:
    state = TrainingState(nn.ModuleDict()).state_dict()
    assert state["model"] == {}
    TrainingState(nn.ModuleDict()).load_state_dict(state)


def test_another_training_resumes_from_the_state() -> None:
    model, optimizer = trained(0.25)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9])
    state = TrainingState(model, [optimizer], {"scheduler": scheduler}).state_dict()

    other, its_optimizer = trained()
    its_scheduler = torch.optim.lr_scheduler.MultiStepLR(its_optimizer, [1])
    TrainingState(other, [its_optimizer], {"scheduler": its_scheduler}).load_state_dict(state)

    assert torch.equal(other.weight, model.weight)  # type: ignore[arg-type]
    assert its_optimizer.param_groups[0]["lr"] == 0.25
    assert its_scheduler.milestones == Counter([5, 9])


def test_an_optimizer_without_saved_state_is_not_changed() -> None:
    model, _ = trained()
    state = TrainingState(model).state_dict()
    other, optimizer = trained(0.25)
    before = str(optimizer.state_dict())
    assert TrainingState(other, [optimizer]).load_state_dict(state) == []
    assert torch.equal(other.weight, model.weight)  # type: ignore[arg-type]
    assert str(optimizer.state_dict()) == before


def test_an_object_that_rejects_its_state_is_named() -> None:
    """For example an average of a model that was not wrapped by DDP."""
    with pytest.raises(ConfigError, match=r"(?s)ema \(Linear\) rejected the saved.*module\.weight"):
        load_object_state({"module.weight": torch.ones(1, 1)}, "ema", nn.Linear(1, 1))


def test_a_scaler_that_was_disabled_is_not_restored() -> None:
    def training(*, enabled: bool) -> TrainingState:
        return TrainingState(
            nn.Linear(1, 1), (), {"scaler": torch.amp.GradScaler("cpu", 8, enabled=enabled)}
        )

    saved = training(enabled=False).state_dict()
    scaled = training(enabled=True)
    assert scaled.load_state_dict(saved) == ["scaler"]
    assert scaled.stateful_objects["scaler"].get_scale() == 8
    assert training(enabled=False).load_state_dict(saved) == []


def test_copied_containers_are_not_shared_with_the_objects() -> None:
    extra_state = {"deep": [{"n": 1}]}

    class Noting(nn.Linear):
        def get_extra_state(self) -> Any:
            return extra_state

    model = Noting(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight_state = optimizer.state[model.weight]
    weight_state["lists"] = [{"n": 1}]
    state = copy_containers(TrainingState(model, [optimizer]).state_dict())
    assert state["model"]["weight"].data_ptr() == model.weight.data_ptr()
    assert state["model"]._metadata[""] == {"version": 1}
    state["model"]["_extra_state"]["deep"][0]["n"] = 2
    state["optimizer"]["state"]["weight"]["lists"][0]["n"] = 2
    assert (extra_state, weight_state) == ({"deep": [{"n": 1}]}, {"lists": [{"n": 1}]})


def test_extracted_tensors_are_inserted_again() -> None:
    value: dict[Any, Any] = {
        1: torch.ones(2),
        "deep": [{"t": torch.zeros(1)}, (2, torch.ones(1))],
        "kind": Counter([3]),
    }
    extracted = extract_tensors(value)
    assert isinstance(extracted["structure"], OpaqueValue)
    assert extracted["tensors"].keys() == {"/1", "/deep/0/t", "/deep/1/1"}
    again = insert_tensors(**extracted)
    assert str(again) == str(value)
    assert type(again["kind"]) is Counter


@pytest.mark.parametrize(
    "value",
    [
        {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}},
        {1: torch.zeros(1), "1": torch.ones(1), "1'": torch.ones(2)},
        OrderedDict(x=torch.ones(1), y=OrderedDict(z=torch.zeros(1))),
        {"x": ("spotfit: tensor", "of the user's own")},
        {"mask": torch.eye(2).to_sparse(), "dense": torch.ones(1)},
    ],
)
def test_tensors_with_similar_keys_are_not_confused(value: Any) -> None:
    extracted = extract_tensors(value)
    assert all(tensor.layout is torch.strided for tensor in extracted["tensors"].values())
    assert str(insert_tensors(**extracted)) == str(value)


class Pair(NamedTuple):
    weight: torch.Tensor
    steps: int


def test_a_user_defined_class_is_reported_by_its_key() -> None:
    whole = extract_tensors({"pair": Pair(torch.ones(1), 2)})["structure"].value
    with pytest.raises(ConfigError, match=r"stateful_objects\.average\.structure\.pair contains"):
        encode_values([whole], keys=[("stateful_objects", "average", "structure")])


def test_an_expanded_buffer_is_rejected_by_name() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("mask", torch.zeros(1).expand(5))
    with pytest.raises(ConfigError, match=r"Expanded tensors .*: mask") as error:
        TrainingState(model).state_dict()
    assert ".clone()" in error.value.do
    model.register_buffer("mask", torch.zeros(1).expand(5).clone())
    model.register_buffer("one", torch.zeros(1).expand(1, 1))
    TrainingState(model).state_dict()


def test_a_sparse_buffer_is_rejected_by_name() -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("mask", torch.eye(2).to_sparse())
    with pytest.raises(ConfigError, match=r"Sparse tensors .*: mask"):
        TrainingState(model).state_dict()
    model.register_buffer("mask", torch.eye(2).to_sparse(), persistent=False)
    TrainingState(model).state_dict()


def test_placements_contain_only_tensors_that_are_not_on_the_cpu() -> None:
    assert "placements" not in extract_tensors({"x": torch.ones(1)})
    assert extract_tensors({"x": torch.empty(1, device="meta")})["placements"].value == {
        "/x": ("meta", False)
    }


def test_values_without_tensors_are_not_copied() -> None:
    value = {"milestones": Counter({5: 1}), "last": [0.1]}
    assert extract_tensors(value)["structure"].value is value


def test_random_numbers_repeat_after_restoring_the_rng_state() -> None:
    def draw() -> list[float]:
        return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]

    before = rng_state()
    first = draw()
    set_rng_state(before)
    assert draw() == first
    assert ("cuda" in before) == gpu_in_use()


def test_whether_a_gpu_is_in_use_is_answered_without_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`is_available()` initializes the driver, after which a fork cannot use the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("the driver was asked"))
    assert gpu_in_use() == torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


GPU_FREE_CHECK = """
import os, torch
from pathlib import Path
from spotfit.fork_server.server import open_gpu_files
from spotfit.torch.checkpoint.training_state import gpu_in_use
print(gpu_in_use(), bool(open_gpu_files(Path("/proc/self/fd"))))
pid = os.fork()
if pid == 0:
    torch.ones(1, device="cuda")
    os._exit(0)
print(os.waitpid(pid, 0)[1])
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_fork_is_usable_after_the_question() -> None:
    output = subprocess.run(
        [sys.executable, "-c", GPU_FREE_CHECK], capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == ["False", "False", "0"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_random_numbers_of_a_workers_second_gpu_repeat() -> None:
    torch.ones(1, device="cuda")
    before = rng_state()
    first = torch.rand(3, device="cuda:1").tolist()
    set_rng_state(before)
    assert torch.rand(3, device="cuda:1").tolist() == first
