"""Who writes what: everything once, the work split evenly, and nothing that is code."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.frameworks.torch.shares import Gather, Share, Shares, plain, unplain
from tests.unit.frameworks.torch.ranks import on_ranks


class Strange:
    """An object of the user's."""


def a_state(**more: Any) -> dict[str, Any]:
    weights = {f"w{n}": torch.full((100,), float(n)) for n in range(8)}
    return {"model": weights, "lr": 0.5, "betas": (0.9, 0.99), **more}


def names(shares: list[Share]) -> Counter[str]:
    return Counter(piece.name for share in shares for piece in share.pieces)


def test_what_all_hold_alike_is_written_once_each_rank_a_part() -> None:
    shares = on_ranks(4, lambda rank, gather: Shares(rank, gather).of(a_state()))
    assert names(shares) == {f"model.w{n}": 1 for n in range(8)}
    assert [len(share.pieces) for share in shares] == [2, 2, 2, 2]
    leaves = {
        key: value
        for share in shares
        for key, value in zip(share.leaves, share.values, strict=True)
    }
    assert leaves == {("lr",): 0.5, ("betas",): (0.9, 0.99)}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_big_tensor_is_no_single_ranks_work(ranks: int) -> None:
    """Each writes some of its rows, and a later save, new tensors or not, the same ones."""
    big = torch.arange(3.0 * 2**20).view(-1, 512)

    def work(rank: int, gather: Gather) -> list[Share]:
        shares = Shares(rank, gather)
        return [shares.of(a_state(big=big, **more)) for more in ({}, {}, {"late": big[:1]})]

    told = on_ranks(ranks, work)
    written = [sum(piece.size_bytes for piece in first.pieces) for first, *_ in told]
    assert max(written) < 1.25 * sum(written) / ranks
    found = torch.full_like(big, -1.0)
    for first, *later in told:
        for piece, block in zip(first.pieces, first.tensors, strict=True):
            if piece.name == "big":
                found[piece.offsets[0] : piece.offsets[0] + piece.sizes[0]] = block
        for share in later:
            assert [piece for piece in share.pieces if piece.name != "late"] == [*first.pieces]
    assert torch.equal(found, big)


class Scaled(torch.Tensor):
    """Weights as a library of the user's keeps them: no rows that anybody may narrow."""


def test_a_big_tensor_of_another_class_is_one_ranks_and_whole() -> None:
    big = torch.arange(2.0**20).view(-1, 512).as_subclass(Scaled)

    def work(rank: int, gather: Gather) -> list[Share]:
        shares = Shares(rank, gather)
        return [shares.of(a_state(big=big, **more)) for more in ({}, {}, {"late": big[:1]})]

    for shares in zip(*on_ranks(2, work), strict=True):
        found = [
            (piece.shape, piece.sizes, tensor)
            for share in shares
            for piece, tensor in zip(share.pieces, share.tensors, strict=True)
            if piece.name == "big"
        ]
        assert [(shape, sizes) for shape, sizes, _ in found] == [((2048, 512), (2048, 512))]
        assert torch.equal(found[0][2], big)


def test_tensors_of_other_shapes_on_other_ranks_are_refused_where_they_would_be_a_patchwork() -> (
    None
):
    def work(rank: int, gather: Gather, drifting: set[str]) -> Share:
        more = {"big": torch.ones(2**20 + rank), "small": torch.ones(5 + rank)}
        return Shares(rank, gather).of(a_state(**more), drifting=drifting)

    with pytest.raises(
        ConfigError, match=r"1 tensors have .*big for one: \[\(1048576,\), \(1048577"
    ):
        on_ranks(2, lambda rank, gather: work(rank, gather, set()))
    assert names(on_ranks(2, lambda rank, gather: work(rank, gather, {"big"})))["small"] == 1


def test_what_drifts_apart_is_all_the_first_ranks() -> None:
    drifting = {"model.w2", "model.w5", "model.w7"}

    def work(rank: int, gather: Gather) -> Share:
        return Shares(rank, gather).of(a_state(), drifting=drifting)

    shares = on_ranks(4, work)
    assert names(shares) == {f"model.w{n}": 1 for n in range(8)}
    assert drifting <= {piece.name for piece in shares[0].pieces}


def test_what_drifts_apart_and_the_first_rank_lacks_is_the_next_ones() -> None:
    def work(rank: int, gather: Gather) -> Share:
        more = {"late": torch.zeros(3)} if rank > 0 else {}
        return Shares(rank, gather).of(a_state(**more), drifting={"late"})

    shares = on_ranks(3, work)
    assert [names([share])["late"] for share in shares] == [0, 1, 0]


def test_weights_that_ranks_do_not_hold_alike_are_told_of_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A model for each rank, or one whose copies meet now and then only."""

    def work(rank: int, gather: Gather) -> None:
        state = a_state()
        state["model"]["w3"][-1] += rank
        state["model"]["w5"] += rank  # a buffer
        shares = Shares(rank, gather)
        for more in ({}, {"late": torch.zeros(3)}):
            shares.of(state | more, drifting={"model.w5"})

    on_ranks(3, work)
    told = capsys.readouterr().err
    assert told.count("checkpoint.ranks_differ") == 1
    assert "parts=1 such_as=model.w3" in told


def test_options_that_optimizers_of_stages_have_of_their_own_are_told_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Groups go by their places: all ranks would go on with the first one's rate."""

    def work(rank: int, gather: Gather) -> None:
        group = {"params": [f"w{rank}"], "lr": 0.1 * (rank + 1), "amsgrad": False}
        Shares(rank, gather).of(a_state() | {"optimizer": {"param_groups": [group]}})

    on_ranks(2, work)
    assert "parts=1 such_as=optimizer.param_groups.0.lr" in capsys.readouterr().err


def test_weights_that_ranks_hold_alike_are_not_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is what only one of them holds, and what is no number."""

    def work(rank: int, gather: Gather) -> None:
        state = a_state()
        state["model"] |= {
            "scalar": torch.ones(()),
            "empty": torch.ones(0, 3),
            "nan": torch.full((2, 3), float("nan")),
            "half": torch.ones(3, 3, dtype=torch.bfloat16).t(),
            "count": torch.tensor([rank]),
            f"stage{rank}": torch.full((3,), float(rank)),
        }
        Shares(rank, gather).of(state)

    on_ranks(3, work)
    assert capsys.readouterr().err == ""


def test_later_a_rank_asks_nobody() -> None:
    asked: list[Any] = []

    def work(rank: int, gather: Gather) -> list[Share]:
        def noting(mine: Any) -> list[Any]:
            asked.append(mine)
            return gather(mine)

        shares = Shares(rank, noting)
        first = shares.of(a_state())
        before = len(asked)
        rest = [shares.of(a_state()) for _ in range(2)]
        assert len(asked) - before <= 2, "whether anybody's state has changed"
        return [first, *rest]

    for first, *rest in on_ranks(2, work):
        assert [one.shape for one in rest] == [first.shape] * 2


def test_what_comes_later_is_written_by_all_who_hold_it_until_it_is_dealt_out() -> None:
    def work(rank: int, gather: Gather) -> list[Share]:
        shares = Shares(rank, gather)
        late = a_state(late=torch.zeros(3))
        return [shares.of(a_state()), shares.of(a_state()), shares.of(late), shares.of(late)]

    ranks = on_ranks(2, work)
    third, fourth = ([one[n] for one in ranks] for n in (2, 3))
    assert names(third)["late"] == 2
    assert names(fourth)["late"] == 1
    assert names(fourth).total() == 9


def test_all_know_how_much_the_rank_with_the_most_writes() -> None:
    """Its tensors at first, and all of its last save whenever ranks speak."""

    def work(rank: int, gather: Gather) -> list[int]:
        shares, known = Shares(rank, gather), []
        for last_bytes in (0, 5000 + rank, 9000, 7000):
            shares.of({f"stage{rank}": torch.zeros(1 + 1000 * rank)}, last_bytes=last_bytes)
            known.append(shares.largest_bytes)
        return known

    assert on_ranks(2, work) == [[4004, 5001, 5001, 7000]] * 2


def test_what_is_gone_is_written_no_more() -> None:
    def work(rank: int, gather: Gather) -> Share:
        shares = Shares(rank, gather)
        for _ in range(2):
            shares.of(a_state(late=torch.zeros(3)))
        return shares.of(a_state())

    assert names(on_ranks(2, work))["late"] == 0


def test_tensors_are_those_in_use() -> None:
    state = a_state()
    share = Shares(0, lambda mine: [mine]).of(state)
    state["model"]["w0"][5] = 77
    assert any(77 in tensor for tensor in share.tensors)


def test_plain_values_come_back_in_kind() -> None:
    values = [1, 2.5, None, "x", (1, 2), {3: "three"}, Counter([5]), torch.arange(3), float("inf")]
    assert str(unplain(plain(values))) == str(values)


def test_what_only_a_pickle_could_hold_is_refused_by_name() -> None:
    keys = [("others", "fine", "whole"), ("others", "ema", "whole")]
    with pytest.raises(ConfigError, match=r"The state of others\.ema\.whole\.clock holds objects"):
        plain([1, {"clock": Strange()}], of=keys)


@pytest.mark.parametrize("value", [lambda: 1, threading.Lock(), {1: [Strange]}, np.ones(2)])
def test_what_no_reader_would_take_is_refused_before_it_is_written(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"The state of loader\S* holds"):
        plain({"dice": [1], "loader": value})


def test_numbers_of_numpy_become_numbers() -> None:
    values = [{"best": np.float64(0.5), np.int64(3): [np.bool_(True)]}, OrderedDict(n=np.int8(2))]
    read = unplain(plain(values))
    assert read == [{"best": 0.5, 3: [True]}, {"n": 2}]
    assert [type(one) for one in read[0].values()] == [float, list]
    assert type(read[1]) is OrderedDict


def test_a_pickle_in_the_bucket_is_never_run() -> None:
    import io

    body = io.BytesIO()
    torch.save([Strange()], body)
    with pytest.raises(IntegrityError, match="cannot be read"):
        unplain(body.getvalue())
