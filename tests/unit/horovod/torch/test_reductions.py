"""Reductions over three ranks, against values computed without them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import spotfit.horovod.torch as hvd
from spotfit.core.errors import ConfigError
from tests.unit.horovod.rank_processes import RankProcesses

VALUES = torch.tensor([[1.0, -2.0], [4.0, 0.5], [7.0, 3.25]])
"""The tensor of each rank."""


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (hvd.Average, VALUES.mean(0)),
        (hvd.Sum, VALUES.sum(0)),
        (hvd.Min, VALUES.amin(0)),
        (hvd.Max, VALUES.amax(0)),
        (hvd.Product, VALUES.prod(0)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_allreduce_combines_the_tensors_of_all_ranks(
    ranks: RankProcesses, op: Any, expected: torch.Tensor
) -> None:
    def reduce() -> tuple[torch.Tensor, torch.Tensor]:
        own = VALUES[hvd.rank()].clone()
        return hvd.allreduce(own, op=op), own

    for rank, (reduced, own) in enumerate(ranks.run(reduce)):
        torch.testing.assert_close(reduced, expected, rtol=1e-7, atol=0)
        assert own.equal(VALUES[rank]), "the argument is not changed"


def test_allreduce_averages_by_default(ranks: RankProcesses) -> None:
    def reduce() -> list[torch.Tensor]:
        own = VALUES[hvd.rank()]
        return [hvd.allreduce(own), hvd.allreduce(own, average=False)]

    for average, total in ranks.run(reduce):
        torch.testing.assert_close(average, VALUES.mean(0), rtol=1e-7, atol=0)
        assert total.equal(VALUES.sum(0))


def test_averages_of_integers_are_truncated(ranks: RankProcesses) -> None:
    def reduce() -> list[int]:
        reduced: list[int] = hvd.allreduce(
            torch.tensor([[-7, 3], [-1, 3], [0, 4]])[hvd.rank()]
        ).tolist()
        return reduced

    assert ranks.run(reduce) == [[-2, 3]] * 3


def test_factors_scale_before_and_after_the_reduction(ranks: RankProcesses) -> None:
    def reduce() -> torch.Tensor:
        own = VALUES[hvd.rank()].half() * 10_000
        return hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.125, postscale_factor=0.5)

    # Without the first factor the sum would be infinite.
    expected = (VALUES.half() * 10_000 * 0.125).sum(0) * 0.5
    for reduced in ranks.run(reduce):
        torch.testing.assert_close(reduced, expected, rtol=1e-3, atol=0)


def test_allreduce_in_place_changes_the_tensor(ranks: RankProcesses) -> None:
    def reduce() -> tuple[torch.Tensor, bool]:
        own = VALUES[hvd.rank()].clone()
        handle = hvd.allreduce_async_(own, op=hvd.Sum)
        return own, hvd.synchronize(handle) is own

    for own, is_same in ranks.run(reduce):
        assert own.equal(VALUES.sum(0))
        assert is_same


def test_a_handle_is_completed_once_all_ranks_have_started(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    def reduce() -> tuple[bool, torch.Tensor, bool]:
        mark = tmp_path / "polled"
        while hvd.rank() == 2 and not mark.exists():
            time.sleep(0.01)
        handle = hvd.allreduce_async(VALUES[hvd.rank()], op=hvd.Sum)
        before = hvd.poll(handle)
        mark.touch()
        return before, hvd.synchronize(handle), hvd.poll(handle)

    results = ranks.run(reduce)
    assert not results[0][0] or not results[1][0], "one of them has polled before rank 2 started"
    for _, reduced, after in results:
        assert reduced.equal(VALUES.sum(0))
        assert after


def test_fp16_compression_adds_in_16_bits(ranks: RankProcesses) -> None:
    def reduce() -> torch.Tensor:
        own = torch.tensor([1.0001, 2048.0]) if hvd.rank() == 0 else torch.tensor([0.0, 1.0])
        return hvd.allreduce(own, op=hvd.Sum, compression=hvd.Compression.fp16)

    for reduced in ranks.run(reduce):
        assert reduced.dtype == torch.float32
        # float16 has 11 bits: 1.0001 is 1, and 2050 may be 2048 after two roundings.
        assert reduced[0] == 1.0
        assert reduced[1] in (2048.0, 2050.0)


def test_grouped_allreduce_reduces_tensors_of_several_types(ranks: RankProcesses) -> None:
    def tensors(rank: int) -> list[torch.Tensor]:
        return [
            torch.full((2, 3), float(rank)),
            torch.tensor([rank, 10 * rank]),
            torch.tensor(rank + 0.5),
        ]

    def reduce() -> list[list[torch.Tensor]]:
        own = tensors(hvd.rank())
        return [
            hvd.grouped_allreduce(own, op=hvd.Sum),
            hvd.grouped_allreduce_(own, op=hvd.Max),
            own,
        ]

    expected_sums = [sum(parts) for parts in zip(*map(tensors, range(3)), strict=True)]
    for sums, maxima, own in ranks.run(reduce):
        torch.testing.assert_close(sums, expected_sums)
        torch.testing.assert_close(maxima, tensors(2))
        torch.testing.assert_close(own, tensors(2))


def test_sparse_tensors_are_added_up(ranks: RankProcesses) -> None:
    def sparse(rank: int) -> torch.Tensor:
        values = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1)
        places = torch.tensor([[0, rank + 1]])
        return torch.sparse_coo_tensor(places, values, (5, 2), check_invariants=True)

    def reduce() -> torch.Tensor:
        total = hvd.sparse_allreduce_async(sparse(hvd.rank()), name="x", op=hvd.Average)()
        assert total.is_sparse
        return total.to_dense()

    expected = sum(sparse(rank).to_dense() for rank in range(3)) / 3
    for total in ranks.run(reduce):
        torch.testing.assert_close(total, expected)


def test_reducescatter_gives_each_rank_its_rows(ranks: RankProcesses) -> None:
    def reduce() -> torch.Tensor:
        return hvd.reducescatter(torch.arange(10.0).reshape(5, 2) * (hvd.rank() + 1), op=hvd.Sum)

    whole = torch.arange(10.0).reshape(5, 2) * 6
    parts = ranks.run(reduce)
    assert [len(part) for part in parts] == [2, 2, 1], "the first ranks have one row more"
    assert torch.cat(parts).equal(whole)


def test_gradients_of_an_average_are_averaged(ranks: RankProcesses) -> None:
    def differentiate() -> torch.Tensor | None:
        own = VALUES[hvd.rank()].clone().requires_grad_()
        (hvd.allreduce(own) * (hvd.rank() + 1)).sum().backward()  # type: ignore[no-untyped-call]
        return own.grad

    # The gradient of the result is rank + 1 on each rank.
    for gradient in ranks.run(differentiate):
        torch.testing.assert_close(gradient, torch.full((2,), 2.0))


def test_gradients_of_grouped_sums_are_added_up(ranks: RankProcesses) -> None:
    def differentiate() -> tuple[torch.Tensor, ...]:
        first = torch.ones(2, requires_grad=True)
        second = torch.ones(3, requires_grad=True)
        sums = hvd.grouped_allreduce([first, second], op=hvd.Sum)
        loss = sums[0].sum() * (hvd.rank() + 1) + sums[1].sum() * 10
        return torch.autograd.grad(loss, [first, second])

    for first, second in ranks.run(differentiate):
        assert first.equal(torch.full((2,), 6.0))
        assert second.equal(torch.full((3,), 30.0))


def test_gradients_of_reducescatter_are_gathered(ranks: RankProcesses) -> None:
    def differentiate() -> torch.Tensor | None:
        own = torch.ones(5, requires_grad=True)
        (hvd.reducescatter(own) * (hvd.rank() + 1)).sum().backward()  # type: ignore[no-untyped-call]
        return own.grad

    for gradient in ranks.run(differentiate):
        assert gradient.equal(torch.tensor([1.0, 1.0, 2.0, 2.0, 3.0]))


def test_gradients_of_a_maximum_are_rejected(ranks: RankProcesses) -> None:
    def differentiate() -> str:
        own = VALUES[hvd.rank()].clone().requires_grad_()
        reduced = hvd.allreduce(own, op=hvd.Max)
        try:
            reduced.sum().backward()  # type: ignore[no-untyped-call]
        except ConfigError as error:
            return str(error)
        return ""

    assert all(
        "op=Max is not supported in a backward pass" in one for one in ranks.run(differentiate)
    )


@pytest.mark.usefixtures("alone")
def test_adasum_is_rejected_with_a_reason() -> None:
    with pytest.raises(ConfigError, match="Adasum is an algorithm of Horovod's library"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum)


@pytest.mark.usefixtures("alone")
def test_op_and_average_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="contradict"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)


@pytest.mark.usefixtures("alone")
def test_a_tensor_that_is_not_contiguous_is_rejected_in_place() -> None:
    with pytest.raises(ConfigError, match="not contiguous"):
        hvd.allreduce_(torch.ones(2, 3).T)


@pytest.mark.usefixtures("alone")
def test_one_rank_alone_reduces_to_its_own_tensor() -> None:
    own = torch.tensor([1.5, 2.0])
    assert hvd.allreduce(own).equal(own)
    assert hvd.allreduce(own, prescale_factor=2.0, postscale_factor=3.0).equal(own * 6)
    assert hvd.reducescatter(own).equal(own)


def test_collectives_need_init() -> None:
    with pytest.raises(ConfigError, match=r"hvd.init\(\)"):
        hvd.allreduce(torch.ones(1))
