"""Who writes what: everything once, the work split evenly, and nothing that is code."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest
import torch

from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.shares import Gather, Share, Shares, plain, unplain
from tests.unit.frameworks.torch.ranks import on_ranks


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
    with pytest.raises(ConfigError, match=r"The state of others\.ema\.whole holds objects"):
        plain([1, {"clock": Strange()}], of=keys)


def test_a_pickle_in_the_bucket_is_never_run() -> None:
    import io

    body = io.BytesIO()
    torch.save([Strange()], body)
    with pytest.raises(pickle.UnpicklingError):
        unplain(body.getvalue())


class Strange:
    """An object of the user's."""
