"""A saved state is loaded at any world size, or rejected with all differences."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from spotfit.checkpoint.format import FORMAT_VERSION, SnapshotIndex, TensorPiece, split_into_chunks
from spotfit.checkpoint.reader import MemoryShardReader, SavedState, open_committed_snapshot
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.core.errors import ConfigError
from spotfit.store.factory import open_store
from spotfit.torch.checkpoint.compatibility import OPTIMIZER_COMPONENT
from spotfit.torch.checkpoint.load_plan import (
    StateLoadPlan,
    allocate_tensor_for,
    saved_components,
)
from spotfit.torch.checkpoint.save_plan import (
    AllGatherObjectFn,
    SavePlanCache,
    decode_values,
    encode_values,
)
from spotfit.torch.checkpoint.tensor_arena import TensorArena
from spotfit.torch.checkpoint.training_state import CPU_PLACEMENT, extract_tensors, insert_tensors
from tests.unit.frameworks.torch.ranks import run_on_ranks
from tests.unit.torch.checkpoint.loading import load_state

GOLDEN = Path(__file__).parents[3] / "golden/snapshot"


def a_state(fill: float, lr: float = 0.1, **other: Any) -> dict[str, Any]:
    return {
        "model": {f"w{n}": torch.full((n + 1, 4), fill + n) for n in range(5)},
        "optimizer": {"param_groups": [{"lr": lr, "params": ["w0"]}]},
        "stateful_objects": {name: extract_tensors(one) for name, one in other.items()},
    }


def saved_by(world_size: int, folder: Path, state: dict[str, Any]) -> SavedState:
    def work(rank: int, gather: AllGatherObjectFn) -> MemoryShardReader:
        share = SavePlanCache(rank, gather).plan(state)
        arena = TensorArena([folder], lambda where: where / f"{rank}")
        arena.reserve(share.pieces)
        arena.copy(share.tensors)
        index = SnapshotIndex(
            rank=rank,
            world_size=world_size,
            step=1,
            pieces=share.pieces,
            value_keys=share.value_keys,
            encoded_values=encode_values(share.values),
            chunks=split_into_chunks(share.pieces),
        )
        arena.publish(index)
        return MemoryShardReader(ShmSegment.open(arena.path))

    return SavedState(run_on_ranks(world_size, work), "ck")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_state_saved_by_several_ranks_is_restored(tmp_path: Path, world_size: int) -> None:
    ema = {"shadow": torch.ones(3), "steps": {5: 1}}
    saved = saved_by(world_size, tmp_path, a_state(7.0, 0.5, ema=ema))
    state = a_state(0.0, 0.1, ema={"shadow": torch.zeros(3), "steps": {}})
    weight = state["model"]["w3"]
    load_state(state, saved)
    assert weight.unique().tolist() == [10.0], "the tensor in use"
    assert state["optimizer"]["param_groups"] == [{"lr": 0.5, "params": ["w0"]}]
    restored = insert_tensors(**state["stateful_objects"]["ema"])
    assert restored["steps"] == {5: 1}
    assert restored["shadow"].tolist() == [1.0] * 3


def test_a_tensor_split_among_ranks_is_restored(tmp_path: Path) -> None:
    big = torch.arange(2.0 * 2**20).view(-1, 256)
    saved = saved_by(4, tmp_path, a_state(1.0) | {"big": big})
    assert sum(piece.name == "big" for index in saved.indices for piece in index.pieces) > 4
    state = a_state(0.0) | {"big": torch.zeros_like(big)}
    load_state(state, saved)
    assert torch.equal(state["big"], big)


def test_an_object_without_tensors_gets_the_saved_ones(tmp_path: Path) -> None:
    saved = saved_by(2, tmp_path, a_state(1.0, ema={"shadow": torch.ones(3)}))
    state = a_state(0.0, ema={})
    load_state(state, saved)
    assert insert_tensors(**state["stateful_objects"]["ema"])["shadow"].tolist() == [1.0] * 3


@pytest.mark.usefixtures("group")
def test_allocated_tensors_are_sharded_as_saved(tmp_path: Path) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))

    def sharded(fill: float, *shape: int, by: int = 0) -> DTensor:
        return distribute_tensor(torch.full(shape, float(fill)), mesh, [Shard(by)])

    weights = {"w": sharded(1, 4, 4), "out.w": sharded(2, 4, 4, by=1), "b": torch.ones(2)}
    original = {
        "w": weights["w"] + 1,
        "out.w": weights["out.w"] + 1,
        "odd": sharded(4, 3),
        "n": torch.ones(1),
    }
    state = {"model": weights, "stateful_objects": {"average": extract_tensors(original)}}
    saved = saved_by(1, tmp_path, state)
    again: dict[str, Any] = {
        "model": weights,
        "stateful_objects": {"average": extract_tensors({"w": None})},
    }
    load_state(again, saved)
    average = insert_tensors(**again["stateful_objects"]["average"])
    assert str(average["w"].lerp(weights["w"], 0.5)) == str(weights["w"] + 0.5)
    assert average["out.w"].placements == (Shard(1),)
    assert average["odd"].placements == (Replicate(),)
    assert average["odd"].full_tensor().tolist() == [4.0] * 3
    assert type(average["n"]) is torch.Tensor
    alone: dict[str, Any] = {
        "model": {name: torch.zeros(one.shape) for name, one in weights.items()},
        "stateful_objects": {"average": extract_tensors({"w": None})},
    }
    load_state(alone, saved)
    assert insert_tensors(**alone["stateful_objects"]["average"])["w"].tolist() == [[2.0] * 4] * 4


def test_allocated_tensors_are_on_the_device_of_the_weights() -> None:
    piece = TensorPiece(
        key=("stateful_objects", "average", "tensors", "/x"),
        dtype="float32",
        shape=(2,),
        offsets=(0,),
        sizes=(2,),
        start=0,
        size_bytes=8,
    )
    weights = {"w": torch.empty(1, device="meta")}
    assert allocate_tensor_for(piece, ("meta", False), weights).device.type == "meta"
    assert allocate_tensor_for(piece, ("meta", True), weights).device.type == "meta"
    assert allocate_tensor_for(piece, ("cuda", False), weights).device.type == "cpu"
    assert allocate_tensor_for(piece, CPU_PLACEMENT, weights).device.type == "cpu"


def test_shards_are_resharded(tmp_path: Path) -> None:
    """Two ranks saved rows of a weight; one rank reads all of them."""
    whole = torch.arange(24.0).view(6, 4)
    parts = []
    for rank, rows in enumerate((range(4), range(4, 6))):
        box = whole[rows.start : rows.stop]
        piece = TensorPiece(
            key=("model", "w"),
            dtype="float32",
            shape=(6, 4),
            offsets=(rows.start, 0),
            sizes=(len(rows), 4),
            start=0,
            size_bytes=box.nbytes,
        )
        segment = ShmSegment.create(tmp_path / f"{rank}", piece.end)
        segment.payload[: piece.end] = box.numpy().tobytes()
        segment.publish(
            SnapshotIndex(
                rank=rank, world_size=2, step=1, pieces=(piece,), chunks=split_into_chunks((piece,))
            )
        )
        parts.append(MemoryShardReader(segment))
    state: dict[str, Any] = {"model": {"w": torch.zeros(6, 4)}, "stateful_objects": {}}
    load_state(state, SavedState(parts))
    assert torch.equal(state["model"]["w"], whole)


def test_another_model_is_rejected_with_all_differences(tmp_path: Path) -> None:
    saved = saved_by(1, tmp_path, a_state(1.0))
    state = a_state(0.0)
    state["model"]["new"] = torch.zeros(1)
    state["model"]["w0"] = torch.zeros(9, 9)
    with pytest.raises(
        ConfigError, match=r"model\.new was not saved; model\.w0 is \(9, 9\), was \(1, 4\)"
    ):
        load_state(state, saved)


def test_each_rank_reports_its_unclaimed_names(tmp_path: Path) -> None:
    saved = saved_by(1, tmp_path, a_state(1.0))
    state = a_state(0.0)
    stages = [{"w0", "w1"}, {"w2", "w4"}]  # each rank's own part of the model
    unclaimed = [
        StateLoadPlan(state | {"model": _only(state, names)}, saved).unclaimed_names
        for names in stages
    ]
    assert unclaimed == [{"model.w2", "model.w3", "model.w4"}, {"model.w0", "model.w1", "model.w3"}]


def test_optimizer_state_of_other_parameters_is_unclaimed(tmp_path: Path) -> None:
    def stage(*names: str) -> dict[str, Any]:
        state = a_state(1.0)
        state["optimizer"]["param_groups"][0]["params"] = [*names]
        state["optimizer"]["state"] = {name: {"step": torch.ones(())} for name in names}
        return state

    saved = saved_by(1, tmp_path, stage("w0", "w1", "w2"))
    assert StateLoadPlan(stage("w0"), saved).unclaimed_names == {
        "optimizer.state.w1",
        "optimizer.state.w2",
    }
    assert StateLoadPlan(stage("w0", "w1", "w2"), saved).unclaimed_names == frozenset()


def grouped(*groups: str, lr: float = 0.1) -> dict[str, Any]:
    """Return a state with one param_group per name; an empty name makes an empty group."""
    state = a_state(1.0)
    state["optimizer"]["param_groups"] = [
        {"params": [name] if name else [], "lr": lr + n} for n, name in enumerate(groups)
    ]
    return state


@pytest.mark.parametrize(
    ("original", "now", "unclaimed"),
    [
        (["w0", "w1", "w2"], ["w0"], {"1", "2"}),
        (["w0", "", "w2"], ["w0"], {"2"}),
        (["w0", ""], [""], {"1"}),
        (["w0", ""], ["w0"], set()),
        (["", "w0", "w1"], ["w0", "w1"], set()),
        (["w0", "w1"], ["w0", ""], set()),  # of a stage that has none of it
    ],
)
def test_removed_param_groups_are_unclaimed_unless_they_were_empty(
    tmp_path: Path, original: list[str], now: list[str], unclaimed: set[str]
) -> None:
    """Otherwise all parameters would get the options of the first group."""
    saved = saved_by(1, tmp_path, grouped(*original))
    places = {f"optimizer.param_groups.{place}" for place in unclaimed}
    assert StateLoadPlan(grouped(*now), saved).unclaimed_names == places


def test_all_saved_param_groups_are_read(tmp_path: Path) -> None:
    original = grouped("", "w0", "w1")
    original["optimizer"]["param_groups"][2]["lr"] = torch.tensor(7.0)
    state = grouped("w0", "w1", lr=0.5)
    load_state(state, saved_by(1, tmp_path, original))
    assert [group["params"] for group in state["optimizer"]["param_groups"]] == [[], ["w0"], ["w1"]]
    assert state["optimizer"]["param_groups"][2]["lr"] == 7


def test_extra_state_of_another_size_is_restored(tmp_path: Path) -> None:
    def state(n: int) -> dict[str, Any]:
        extra = OrderedDict(history=[torch.arange(float(n))], name="fp8")
        beside = {"a._extra_state": torch.arange(n), "b._extra_state": extra}
        return {"model": {"w": torch.ones(2), **beside}, "stateful_objects": {}}

    running = state(2)
    live = running["model"]["b._extra_state"]
    load_state(running, saved_by(2, tmp_path, state(5)))
    assert str(running) == str(state(5))
    assert live["history"][0].tolist() == [0, 1], "the module itself is not changed yet"


def test_saved_components_are_listed_by_name(tmp_path: Path) -> None:
    state = a_state(1.0, ema={"shadow": torch.ones(1)}, scheduler={"step": 1})
    beside = {("extra", "ema"), ("extra", "scheduler")}
    assert saved_components(saved_by(1, tmp_path, state)) == beside | {OPTIMIZER_COMPONENT}
    del state["optimizer"]
    assert saved_components(saved_by(1, tmp_path / "without", state)) == beside


def _only(state: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: weight for name, weight in state["model"].items() if name in names}


def test_dtype_changes_are_reported(tmp_path: Path) -> None:
    saved = saved_by(1, tmp_path, a_state(1.0))
    state = a_state(0.0)
    assert StateLoadPlan(state, saved).dtype_changes == []
    state["model"]["w2"] = state["model"]["w2"].bfloat16()
    assert StateLoadPlan(state, saved).dtype_changes == ["model.w2 is bfloat16, was float32"]


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_a_snapshot_of_every_format_version_is_restored(version: int) -> None:
    """Two ranks wrote each folder of `tests/golden/snapshot`; never regenerate a released one."""
    saved = open_committed_snapshot(open_store(str(GOLDEN / f"v{version}")), "checkpoint")
    assert saved is not None
    state = a_state(0.0, ema={"shadow": torch.zeros(3)})
    load_state(state, saved)
    assert [weight.unique().tolist() for weight in state["model"].values()] == [
        [3.0 + n] for n in range(5)
    ]
    assert state["optimizer"]["param_groups"] == [{"lr": 0.25, "params": ["w0"]}]
    average = insert_tensors(**state["stateful_objects"]["ema"])
    assert (average["shadow"].tolist(), average[7]) == ([1.0] * 3, "seven")
    first = saved.indices[0]
    assert (first.step, first.epoch, first.consumed, first.world_size) == (42, 1, 16, 2)
    assert decode_values(first.encoded_rank_state, "rank 0")["rng_state"]["torch"].tolist() == [
        0,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("kind", ["conjugated", "negative"])
def test_conjugate_and_negative_views_are_restored(tmp_path: Path, kind: str) -> None:
    def view(numbers: torch.Tensor) -> torch.Tensor:
        turned = numbers.conj()
        return turned if kind == "conjugated" else turned[:1].imag

    numbers = torch.complex(torch.arange(3.0), torch.arange(3.0) + 5)
    saved = saved_by(1, tmp_path, a_state(1.0) | {"turned": view(numbers)})
    state = a_state(0.0) | {"turned": view(torch.zeros(3, dtype=torch.complex64))}
    load_state(state, saved)
    assert torch.equal(state["turned"], view(numbers))


def test_an_expanded_tensor_of_an_object_is_replaced(tmp_path: Path) -> None:
    saved = saved_by(1, tmp_path, a_state(1.0, ema={"shadow": torch.arange(3.0)}))
    state = a_state(0.0, ema={"shadow": torch.zeros(1).expand(3)})
    load_state(state, saved)
    assert insert_tensors(**state["stateful_objects"]["ema"])["shadow"].tolist() == [0, 1, 2]


def with_options(**options: Any) -> dict[str, Any]:
    """Return a state with one param_group and these options."""
    state = a_state(1.0)
    state["optimizer"]["param_groups"][0].update(options)
    return state


def test_options_that_were_not_saved_are_kept_and_reported(tmp_path: Path) -> None:
    """torch's schedulers add options to groups; an option may be a tensor."""
    saved = saved_by(1, tmp_path, with_options(eps=torch.ones(2)))
    state = with_options(lr=0.5, eps=torch.zeros(2), max_lr=0.5, initial_lr=torch.tensor(7.0))
    assert StateLoadPlan(state, saved).unsaved_options == [
        "optimizer's initial_lr",
        "optimizer's max_lr",
    ]
    load_state(state, saved)
    expected = [{"lr": 0.1, "params": ["w0"], "eps": torch.ones(2)}]
    assert str(state["optimizer"]["param_groups"]) == str(expected)


def test_unsaved_options_of_several_groups_are_reported_once(tmp_path: Path) -> None:
    saved = saved_by(1, tmp_path, grouped("w0", "w1"))
    state = grouped("w0", "w1")
    for group in state["optimizer"]["param_groups"]:
        group["initial_lr"] = 0.1
    assert StateLoadPlan(state, saved).unsaved_options == ["optimizer's initial_lr"]


def test_an_optimizer_without_saved_state_is_not_read(tmp_path: Path) -> None:
    without = a_state(1.0)
    del without["optimizer"]
    state = a_state(0.0)
    loading = StateLoadPlan(state, saved_by(1, tmp_path, without))
    assert "optimizer" not in state
    assert loading.unsaved_options == [], "the whole optimizer keeps its state"


def test_another_optimizer_class_is_rejected(tmp_path: Path) -> None:
    saved = saved_by(1, tmp_path, with_options(momentum=0.9))
    with pytest.raises(
        ConfigError, match="different optimizer class: its options include momentum, but not eps"
    ):
        load_state(with_options(eps=1e-8), saved)


def test_an_additional_param_group_is_rejected(tmp_path: Path) -> None:
    saved = saved_by(1, tmp_path, grouped("w0"))
    with pytest.raises(ConfigError, match=r"has 1 more param_groups") as error:
        load_state(grouped("w0", "w1"), saved)
    assert "add_param_group" in error.value.do
