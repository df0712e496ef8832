"""Save plans write everything once, balance the ranks, and encode no pickles."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.msgpack import Ext

from spotfit.checkpoint.base_checkpointer import RankSavePlan
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.torch.checkpoint.save_plan import (
    AllGatherObjectFn,
    SavePlanCache,
    decode_values,
    encode_values,
)
from tests.unit.frameworks.torch.ranks import run_on_ranks


class CustomObject:
    """A user-defined class, which needs a pickle."""


def a_state(**more: Any) -> dict[str, Any]:
    weights = {f"w{n}": torch.full((100,), float(n)) for n in range(8)}
    return {"model": weights, "lr": 0.5, "betas": (0.9, 0.99), **more}


def names(shares: list[RankSavePlan]) -> Counter[str]:
    return Counter(piece.name for share in shares for piece in share.pieces)


def test_replicated_state_is_divided_among_the_ranks() -> None:
    shares = run_on_ranks(4, lambda rank, gather: SavePlanCache(rank, gather).plan(a_state()))
    assert names(shares) == {f"model.w{n}": 1 for n in range(8)}
    assert [len(share.pieces) for share in shares] == [2, 2, 2, 2]
    leaves = {
        key: value
        for share in shares
        for key, value in zip(share.value_keys, share.values, strict=True)
    }
    assert leaves == {("lr",): 0.5, ("betas",): (0.9, 0.99)}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_large_tensor_is_split_among_the_ranks(ranks: int) -> None:
    """Each rank writes some of its rows, and the same ones in later saves."""
    big = torch.arange(3.0 * 2**20).view(-1, 512)

    def work(rank: int, gather: AllGatherObjectFn) -> list[RankSavePlan]:
        shares = SavePlanCache(rank, gather)
        return [shares.plan(a_state(big=big, **more)) for more in ({}, {}, {"late": big[:1]})]

    plans = run_on_ranks(ranks, work)
    written = [sum(piece.size_bytes for piece in first.pieces) for first, *_ in plans]
    assert max(written) < 1.25 * sum(written) / ranks
    found = torch.full_like(big, -1.0)
    for first, *later in plans:
        for piece, block in zip(first.pieces, first.tensors, strict=True):
            if piece.name == "big":
                found[piece.offsets[0] : piece.offsets[0] + piece.sizes[0]] = block
        for share in later:
            assert [piece for piece in share.pieces if piece.name != "late"] == [*first.pieces]
    assert torch.equal(found, big)


class Scaled(torch.Tensor):
    """A tensor subclass, such as quantized weights, that cannot be split by rows."""


def test_a_large_tensor_subclass_is_written_by_one_rank() -> None:
    big = torch.arange(2.0**20).view(-1, 512).as_subclass(Scaled)

    def work(rank: int, gather: AllGatherObjectFn) -> list[RankSavePlan]:
        shares = SavePlanCache(rank, gather)
        return [shares.plan(a_state(big=big, **more)) for more in ({}, {}, {"late": big[:1]})]

    for shares in zip(*run_on_ranks(2, work), strict=True):
        found = [
            (piece.shape, piece.sizes, tensor)
            for share in shares
            for piece, tensor in zip(share.pieces, share.tensors, strict=True)
            if piece.name == "big"
        ]
        assert [(shape, sizes) for shape, sizes, _ in found] == [((2048, 512), (2048, 512))]
        assert torch.equal(found[0][2], big)


def test_split_tensors_of_different_shapes_are_rejected() -> None:
    def work(rank: int, gather: AllGatherObjectFn, unsynchronized: set[str]) -> RankSavePlan:
        more = {"big": torch.ones(2**20 + rank), "small": torch.ones(5 + rank)}
        return SavePlanCache(rank, gather).plan(a_state(**more), unsynchronized=unsynchronized)

    with pytest.raises(
        ConfigError, match=r"1 tensors, because .*for example big: \[\(1048576,\), \(1048577"
    ):
        run_on_ranks(2, lambda rank, gather: work(rank, gather, set()))
    assert names(run_on_ranks(2, lambda rank, gather: work(rank, gather, {"big"})))["small"] == 1


def test_unsynchronized_state_is_written_by_the_first_rank() -> None:
    unsynchronized = {"model.w2", "model.w5", "model.w7"}

    def work(rank: int, gather: AllGatherObjectFn) -> RankSavePlan:
        return SavePlanCache(rank, gather).plan(a_state(), unsynchronized=unsynchronized)

    shares = run_on_ranks(4, work)
    assert names(shares) == {f"model.w{n}": 1 for n in range(8)}
    assert unsynchronized <= {piece.name for piece in shares[0].pieces}


def test_unsynchronized_state_that_rank_0_lacks_is_written_by_the_next() -> None:
    def work(rank: int, gather: AllGatherObjectFn) -> RankSavePlan:
        more = {"late": torch.zeros(3)} if rank > 0 else {}
        return SavePlanCache(rank, gather).plan(a_state(**more), unsynchronized={"late"})

    shares = run_on_ranks(3, work)
    assert [names([share])["late"] for share in shares] == [0, 1, 0]


def test_diverging_weights_are_logged_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ranks with separate models, or with models that are averaged only now and then."""

    def work(rank: int, gather: AllGatherObjectFn) -> None:
        state = a_state()
        state["model"]["w3"][-1] += rank
        state["model"]["w5"] += rank  # a buffer
        shares = SavePlanCache(rank, gather)
        for more in ({}, {"late": torch.zeros(3)}):
            shares.plan(state | more, unsynchronized={"model.w5"})

    run_on_ranks(3, work)
    output = capsys.readouterr().err
    assert output.count("checkpoint.ranks_diverge") == 1
    assert "parts=1 example=model.w3" in output


def test_diverging_optimizer_options_are_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """param_groups are keyed by position: all ranks would get the first rank's lr."""

    def work(rank: int, gather: AllGatherObjectFn) -> None:
        group = {"params": [f"w{rank}"], "lr": 0.1 * (rank + 1), "amsgrad": False}
        SavePlanCache(rank, gather).plan(a_state() | {"optimizer": {"param_groups": [group]}})

    run_on_ranks(2, work)
    assert "parts=1 example=optimizer.param_groups.0.lr" in capsys.readouterr().err


def test_equal_weights_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    """State that only one rank holds, and integers, are not compared."""

    def work(rank: int, gather: AllGatherObjectFn) -> None:
        state = a_state()
        state["model"] |= {
            "scalar": torch.ones(()),
            "empty": torch.ones(0, 3),
            "nan": torch.full((2, 3), float("nan")),
            "half": torch.ones(3, 3, dtype=torch.bfloat16).t(),
            "count": torch.tensor([rank]),
            f"stage{rank}": torch.full((3,), float(rank)),
        }
        SavePlanCache(rank, gather).plan(state)

    run_on_ranks(3, work)
    assert capsys.readouterr().err == ""


def test_most_later_plans_need_no_collective() -> None:
    collectives: list[Any] = []

    def work(rank: int, gather: AllGatherObjectFn) -> list[RankSavePlan]:
        def record(value: Any) -> list[Any]:
            collectives.append(value)
            return gather(value)

        shares = SavePlanCache(rank, record)
        first = shares.plan(a_state())
        before = len(collectives)
        rest = [shares.plan(a_state()) for _ in range(2)]
        assert len(collectives) - before <= 2, "whether any rank's state has changed"
        return [first, *rest]

    for first, *rest in run_on_ranks(2, work):
        assert [(one.pieces, one.value_keys) for one in rest] == [
            (first.pieces, first.value_keys)
        ] * 2


def test_new_tensors_are_written_by_all_holders_until_the_next_global_plan() -> None:
    def work(rank: int, gather: AllGatherObjectFn) -> list[RankSavePlan]:
        shares = SavePlanCache(rank, gather)
        late = a_state(late=torch.zeros(3))
        return [
            shares.plan(a_state()),
            shares.plan(a_state()),
            shares.plan(late),
            shares.plan(late),
        ]

    ranks = run_on_ranks(2, work)
    third, fourth = ([one[n] for one in ranks] for n in (2, 3))
    assert names(third)["late"] == 2
    assert names(fourth)["late"] == 1
    assert names(fourth).total() == 9


def test_all_ranks_know_the_largest_save() -> None:
    """The size of the tensors at first, and of the whole last save after each collective."""

    def work(rank: int, gather: AllGatherObjectFn) -> list[int]:
        shares, sizes = SavePlanCache(rank, gather), []
        for last_bytes in (0, 5000 + rank, 9000, 7000):
            shares.plan({f"stage{rank}": torch.zeros(1 + 1000 * rank)}, last_save_bytes=last_bytes)
            sizes.append(shares.largest_rank_bytes)
        return sizes

    assert run_on_ranks(2, work) == [[4004, 5001, 5001, 7000]] * 2


def test_removed_tensors_are_not_written() -> None:
    def work(rank: int, gather: AllGatherObjectFn) -> RankSavePlan:
        shares = SavePlanCache(rank, gather)
        for _ in range(2):
            shares.plan(a_state(late=torch.zeros(3)))
        return shares.plan(a_state())

    assert names(run_on_ranks(2, work))["late"] == 0


def test_planned_tensors_share_memory_with_those_in_use() -> None:
    state = a_state()
    share = SavePlanCache(0, lambda value: [value]).plan(state)
    state["model"]["w0"][5] = 77
    assert any(77 in tensor for tensor in share.tensors)


def test_plain_values_keep_their_types() -> None:
    values = [1, 2.5, None, "x", (1, 2), {3: "three"}, Counter([5]), torch.arange(3), float("inf")]
    assert str(decode_values(encode_values(values), "rank 0")) == str(values)


def test_values_that_need_a_pickle_are_rejected_by_name() -> None:
    keys = [("stateful_objects", "fine", "structure"), ("stateful_objects", "ema", "structure")]
    with pytest.raises(
        ConfigError, match=r"The state of stateful_objects\.ema\.structure\.clock contains objects"
    ):
        encode_values([1, {"clock": CustomObject()}], keys=keys)


@pytest.mark.parametrize("value", [lambda: 1, threading.Lock(), {1: [CustomObject]}, np.ones(2)])
def test_values_that_cannot_be_read_are_rejected_before_writing(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"The state of loader\S* contains"):
        encode_values({"rng_state": [1], "loader": value})


def test_numpy_scalars_become_python_numbers() -> None:
    values = [{"best": np.float64(0.5), np.int64(3): [np.bool_(True)]}, OrderedDict(n=np.int8(2))]
    read = decode_values(encode_values(values), "rank 0")
    assert read == [{"best": 0.5, 3: [True]}, {"n": 2}]
    assert [type(one) for one in read[0].values()] == [float, list]
    assert type(read[1]) is OrderedDict


def test_a_pickle_in_the_bucket_is_not_loaded() -> None:
    import io

    body = io.BytesIO()
    torch.save([CustomObject()], body)
    with pytest.raises(IntegrityError, match="are corrupt"):
        decode_values(body.getvalue(), "rank 0")


def test_values_that_msgpack_lacks_are_restored() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    read = decode_values(encode_values([{"\udc80": 1}, jagged]), "rank 0")
    assert read[0] == {"\udc80": 1}
    assert [one.tolist() for one in read[1].unbind()] == [[1, 1], [1, 1, 1]]


def foreign(body: Any) -> bytes:
    return msgspec.msgpack.encode(Ext(7, msgspec.msgpack.encode(["torch", body])))


@pytest.mark.parametrize(
    "body",
    [
        foreign(b""),
        foreign(b"PK\x03\x04xxxx"),
        foreign(5),
        b"PK\x03\x04xxxx",
        msgspec.msgpack.encode(Ext(6, msgspec.msgpack.encode(["float32", [4], b""]))),
        msgspec.msgpack.encode(Ext(6, msgspec.msgpack.encode(["load", [1], b"1234"]))),
    ],
    ids=["empty", "no archive", "a number", "earlier format", "no elements", "no dtype"],
)
def test_corrupt_values_are_rejected(body: bytes) -> None:
    with pytest.raises(IntegrityError, match="The values that rank 0 saved are corrupt"):
        decode_values(body, "rank 0")
