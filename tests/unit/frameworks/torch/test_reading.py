"""A saved state goes into a running one of any number of ranks, or says why it does not fit."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from spotfit.checkpoint.saved import InMemory, Saved, open_saved
from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import FORMAT, Index, Piece, chunks_of
from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.arena import Arena
from spotfit.frameworks.torch.fitting import OPTIMIZER
from spotfit.frameworks.torch.reading import Loading, kept_beside, load_into, room_for
from spotfit.frameworks.torch.shares import Gather, Shares, plain, unplain
from spotfit.frameworks.torch.state import CPU, joined, split
from spotfit.store.opening import open_store
from tests.unit.frameworks.torch.ranks import on_ranks

GOLDEN = Path(__file__).parents[3] / "golden/snapshot"


def a_state(fill: float, lr: float = 0.1, **other: Any) -> dict[str, Any]:
    return {
        "model": {f"w{n}": torch.full((n + 1, 4), fill + n) for n in range(5)},
        "optimizer": {"param_groups": [{"lr": lr, "params": ["w0"]}]},
        "others": {name: split(one) for name, one in other.items()},
    }


def saved_by(world_size: int, folder: Path, state: dict[str, Any]) -> Saved:
    def work(rank: int, gather: Gather) -> InMemory:
        share = Shares(rank, gather).of(state)
        arena = Arena([folder], lambda where: where / f"{rank}")
        arena.fit(share.pieces)
        arena.take(share.tensors)
        index = Index(
            rank,
            world_size,
            1,
            share.pieces,
            share.leaves,
            plain(share.values),
            chunks=chunks_of(share.pieces),
        )
        arena.finish(index)
        return InMemory(Segment.open(arena.path))

    return Saved(on_ranks(world_size, work), "ck")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_whatever_was_dealt_out_comes_together(tmp_path: Path, world_size: int) -> None:
    ema = {"shadow": torch.ones(3), "steps": {5: 1}}
    saved = saved_by(world_size, tmp_path, a_state(7.0, 0.5, ema=ema))
    state = a_state(0.0, 0.1, ema={"shadow": torch.zeros(3), "steps": {}})
    weight = state["model"]["w3"]
    load_into(state, saved)
    assert weight.unique().tolist() == [10.0], "the tensor in use"
    assert state["optimizer"]["param_groups"] == [{"lr": 0.5, "params": ["w0"]}]
    restored = joined(**state["others"]["ema"])
    assert restored["steps"] == {5: 1}
    assert restored["shadow"].tolist() == [1.0] * 3


def test_a_tensor_that_ranks_have_written_together_is_one_again(tmp_path: Path) -> None:
    big = torch.arange(2.0 * 2**20).view(-1, 256)
    saved = saved_by(4, tmp_path, a_state(1.0) | {"big": big})
    assert sum(piece.name == "big" for index in saved.indices for piece in index.pieces) > 4
    state = a_state(0.0) | {"big": torch.zeros_like(big)}
    load_into(state, saved)
    assert torch.equal(state["big"], big)


def test_an_object_that_has_not_begun_gets_what_it_had(tmp_path: Path) -> None:
    saved = saved_by(2, tmp_path, a_state(1.0, ema={"shadow": torch.ones(3)}))
    state = a_state(0.0, ema={})
    load_into(state, saved)
    assert joined(**state["others"]["ema"])["shadow"].tolist() == [1.0] * 3


@pytest.mark.usefixtures("group")
def test_what_begins_late_is_sharded_as_it_was(tmp_path: Path) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))

    def sharded(fill: float, *shape: int, by: int = 0) -> DTensor:
        return distribute_tensor(torch.full(shape, float(fill)), mesh, [Shard(by)])

    weights = {"w": sharded(1, 4, 4), "out.w": sharded(2, 4, 4, by=1), "b": torch.ones(2)}
    kept = {
        "w": weights["w"] + 1,
        "out.w": weights["out.w"] + 1,
        "odd": sharded(4, 3),
        "n": torch.ones(1),
    }
    state = {"model": weights, "others": {"average": split(kept)}}
    saved = saved_by(1, tmp_path, state)
    again: dict[str, Any] = {"model": weights, "others": {"average": split({"w": None})}}
    load_into(again, saved)
    average = joined(**again["others"]["average"])
    assert str(average["w"].lerp(weights["w"], 0.5)) == str(weights["w"] + 0.5)
    assert average["out.w"].placements == (Shard(1),)
    assert average["odd"].placements == (Replicate(),)
    assert average["odd"].full_tensor().tolist() == [4.0] * 3
    assert type(average["n"]) is torch.Tensor
    alone: dict[str, Any] = {
        "model": {name: torch.zeros(one.shape) for name, one in weights.items()},
        "others": {"average": split({"w": None})},
    }
    load_into(alone, saved)
    assert joined(**alone["others"]["average"])["w"].tolist() == [[2.0] * 4] * 4


def test_what_begins_late_lies_on_the_device_of_the_weights_if_it_did() -> None:
    piece = Piece(("others", "average", "tensors", "/x"), "float32", (2,), (0,), (2,), 0, 8)
    weights = {"w": torch.empty(1, device="meta")}
    assert room_for(piece, ("meta", False), weights).device.type == "meta"
    assert room_for(piece, ("meta", True), weights).device.type == "meta"
    assert room_for(piece, ("cuda", False), weights).device.type == "cpu"
    assert room_for(piece, CPU, weights).device.type == "cpu"


def test_shards_are_cut_anew(tmp_path: Path) -> None:
    """Two ranks held the rows of a weight; now one wants all of them."""
    whole = torch.arange(24.0).view(6, 4)
    parts = []
    for rank, rows in enumerate((range(4), range(4, 6))):
        box = whole[rows.start : rows.stop]
        piece = Piece(
            ("model", "w"), "float32", (6, 4), (rows.start, 0), (len(rows), 4), 0, box.nbytes
        )
        segment = Segment.create(tmp_path / f"{rank}", piece.end)
        segment.bytes[: piece.end] = box.numpy().tobytes()
        segment.finish(Index(rank, 2, 1, (piece,), chunks=chunks_of((piece,))))
        parts.append(InMemory(segment))
    state: dict[str, Any] = {"model": {"w": torch.zeros(6, 4)}, "others": {}}
    load_into(state, Saved(parts))
    assert torch.equal(state["model"]["w"], whole)


def test_another_model_is_refused_with_all_that_differs(tmp_path: Path) -> None:
    saved = saved_by(1, tmp_path, a_state(1.0))
    state = a_state(0.0)
    state["model"]["new"] = torch.zeros(1)
    state["model"]["w0"] = torch.zeros(9, 9)
    with pytest.raises(
        ConfigError, match=r"model\.new was not saved; model\.w0 is \(9, 9\), was \(1, 4\)"
    ):
        load_into(state, saved)


def test_what_is_left_of_a_state_is_told_by_each_rank(tmp_path: Path) -> None:
    saved = saved_by(1, tmp_path, a_state(1.0))
    state = a_state(0.0)
    stages = [{"w0", "w1"}, {"w2", "w4"}]  # each rank's own part of the model
    left = [Loading(state | {"model": _only(state, names)}, saved).left for names in stages]
    assert left == [{"model.w2", "model.w3", "model.w4"}, {"model.w0", "model.w1", "model.w3"}]


def test_what_optimizers_knew_of_weights_that_none_learns_is_left(tmp_path: Path) -> None:
    def stage(*learned: str) -> dict[str, Any]:
        state = a_state(1.0)
        state["optimizer"]["param_groups"][0]["params"] = [*learned]
        state["optimizer"]["state"] = {name: {"step": torch.ones(())} for name in learned}
        return state

    saved = saved_by(1, tmp_path, stage("w0", "w1", "w2"))
    assert Loading(stage("w0"), saved).left == {"optimizer.state.w1", "optimizer.state.w2"}
    assert Loading(stage("w0", "w1", "w2"), saved).left == frozenset()


def grouped(*groups: str, lr: float = 0.1) -> dict[str, Any]:
    """Each with the weight of that name, or with none, and a rate of its own."""
    state = a_state(1.0)
    state["optimizer"]["param_groups"] = [
        {"params": [name] if name else [], "lr": lr + n} for n, name in enumerate(groups)
    ]
    return state


@pytest.mark.parametrize(
    ("kept", "now", "left"),
    [
        (["w0", "w1", "w2"], ["w0"], {"1", "2"}),
        (["w0", "", "w2"], ["w0"], {"2"}),
        (["w0", ""], [""], {"1"}),
        (["w0", ""], ["w0"], set()),
        (["", "w0", "w1"], ["w0", "w1"], set()),
        (["w0", "w1"], ["w0", ""], set()),  # of a stage that has none of it
    ],
)
def test_groups_that_are_gone_are_left_but_for_empty_ones(
    tmp_path: Path, kept: list[str], now: list[str], left: set[str]
) -> None:
    """The first group's rate would be that of all."""
    saved = saved_by(1, tmp_path, grouped(*kept))
    places = {f"optimizer.param_groups.{place}" for place in left}
    assert Loading(grouped(*now), saved).left == places


def test_every_group_that_was_saved_is_read_wherever_it_was(tmp_path: Path) -> None:
    kept = grouped("", "w0", "w1")
    kept["optimizer"]["param_groups"][2]["lr"] = torch.tensor(7.0)
    state = grouped("w0", "w1", lr=0.5)
    load_into(state, saved_by(1, tmp_path, kept))
    assert [group["params"] for group in state["optimizer"]["param_groups"]] == [[], ["w0"], ["w1"]]
    assert state["optimizer"]["param_groups"][2]["lr"] == 7


def test_what_a_module_keeps_beside_its_weights_may_have_grown(tmp_path: Path) -> None:
    def state(n: int) -> dict[str, Any]:
        extra = OrderedDict(history=[torch.arange(float(n))], name="fp8")
        beside = {"a._extra_state": torch.arange(n), "b._extra_state": extra}
        return {"model": {"w": torch.ones(2), **beside}, "others": {}}

    running = state(2)
    live = running["model"]["b._extra_state"]
    load_into(running, saved_by(2, tmp_path, state(5)))
    assert str(running) == str(state(5))
    assert live["history"][0].tolist() == [0, 1], "the module has not been told yet"


def test_what_was_saved_beside_the_model_is_known_by_name(tmp_path: Path) -> None:
    state = a_state(1.0, ema={"shadow": torch.ones(1)}, scheduler={"step": 1})
    beside = {("extra", "ema"), ("extra", "scheduler")}
    assert kept_beside(saved_by(1, tmp_path, state)) == beside | {OPTIMIZER}
    del state["optimizer"]
    assert kept_beside(saved_by(1, tmp_path / "without", state)) == beside


def _only(state: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: weight for name, weight in state["model"].items() if name in names}


def test_numbers_of_another_type_are_told(tmp_path: Path) -> None:
    saved = saved_by(1, tmp_path, a_state(1.0))
    state = a_state(0.0)
    assert Loading(state, saved).cast == []
    state["model"]["w2"] = state["model"]["w2"].bfloat16()
    assert Loading(state, saved).cast == ["model.w2 is bfloat16, was float32"]


@pytest.mark.parametrize("version", range(1, FORMAT + 1))
def test_what_every_version_wrote_loads_for_ever(version: int) -> None:
    """Two ranks wrote each folder of `tests/golden/snapshot`; never write one anew."""
    saved = open_saved(open_store(str(GOLDEN / f"v{version}")), "checkpoint")
    assert saved is not None
    state = a_state(0.0, ema={"shadow": torch.zeros(3)})
    load_into(state, saved)
    assert [weight.unique().tolist() for weight in state["model"].values()] == [
        [3.0 + n] for n in range(5)
    ]
    assert state["optimizer"]["param_groups"] == [{"lr": 0.25, "params": ["w0"]}]
    average = joined(**state["others"]["ema"])
    assert (average["shadow"].tolist(), average[7]) == ([1.0] * 3, "seven")
    first = saved.indices[0]
    assert (first.step, first.epoch, first.consumed, first.world_size) == (42, 1, 16, 2)
    assert unplain(first.own)["dice"]["torch"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["conjugated", "negative"])
def test_views_that_turn_the_sign_of_what_lies_in_memory_come_back(
    tmp_path: Path, kind: str
) -> None:
    def view(numbers: torch.Tensor) -> torch.Tensor:
        turned = numbers.conj()
        return turned if kind == "conjugated" else turned[:1].imag

    numbers = torch.complex(torch.arange(3.0), torch.arange(3.0) + 5)
    saved = saved_by(1, tmp_path, a_state(1.0) | {"turned": view(numbers)})
    state = a_state(0.0) | {"turned": view(torch.zeros(3, dtype=torch.complex64))}
    load_into(state, saved)
    assert torch.equal(state["turned"], view(numbers))


def test_an_object_s_expanded_tensor_is_no_room_for_what_it_had(tmp_path: Path) -> None:
    saved = saved_by(1, tmp_path, a_state(1.0, ema={"shadow": torch.arange(3.0)}))
    state = a_state(0.0, ema={"shadow": torch.zeros(1).expand(3)})
    load_into(state, saved)
    assert joined(**state["others"]["ema"])["shadow"].tolist() == [0, 1, 2]


def with_options(**options: Any) -> dict[str, Any]:
    """In the first of one group."""
    state = a_state(1.0)
    state["optimizer"]["param_groups"][0].update(options)
    return state


def test_options_that_were_not_saved_are_left_and_told(tmp_path: Path) -> None:
    """Torch's schedulers write theirs into groups; a tensor is as good as a number."""
    saved = saved_by(1, tmp_path, with_options(eps=torch.ones(2)))
    state = with_options(lr=0.5, eps=torch.zeros(2), max_lr=0.5, initial_lr=torch.tensor(7.0))
    assert Loading(state, saved).anew == ["optimizer's initial_lr", "optimizer's max_lr"]
    load_into(state, saved)
    told = [{"lr": 0.1, "params": ["w0"], "eps": torch.ones(2)}]
    assert str(state["optimizer"]["param_groups"]) == str(told)


def test_all_groups_options_are_told_once(tmp_path: Path) -> None:
    saved = saved_by(1, tmp_path, grouped("w0", "w1"))
    state = grouped("w0", "w1")
    for group in state["optimizer"]["param_groups"]:
        group["initial_lr"] = 0.1
    assert Loading(state, saved).anew == ["optimizer's initial_lr"]


def test_of_an_optimizer_of_which_nothing_was_saved_nothing_is_read(tmp_path: Path) -> None:
    without = a_state(1.0)
    del without["optimizer"]
    state = a_state(0.0)
    loading = Loading(state, saved_by(1, tmp_path, without))
    assert "optimizer" not in state
    assert loading.anew == [], "it begins anew as a whole"


def test_an_optimizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    saved = saved_by(1, tmp_path, with_options(momentum=0.9))
    with pytest.raises(ConfigError, match="another kind of optimizer: that had momentum, and no e"):
        load_into(with_options(eps=1e-8), saved)


def test_a_group_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    saved = saved_by(1, tmp_path, grouped("w0"))
    with pytest.raises(ConfigError, match="more groups of weights than were saved, by 1") as told:
        load_into(grouped("w0", "w1"), saved)
    assert "add_param_group" in told.value.do
