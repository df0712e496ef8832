"""Collectives that move values between three ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spotfit.horovod.torch as hvd
from spotfit.core.errors import ConfigError
from tests.unit.horovod.rank_processes import RankProcesses


def rows_of(rank: int) -> torch.Tensor:
    """As many rows as the rank, plus one, except none on rank 1."""
    count = 0 if rank == 1 else rank + 1
    return torch.arange(2.0 * count).reshape(count, 2) + 10 * rank


def test_allgather_concatenates_different_numbers_of_rows(ranks: RankProcesses) -> None:
    def gather() -> list[torch.Tensor]:
        own = rows_of(hvd.rank())
        return [hvd.allgather(own), hvd.synchronize(hvd.allgather_async(own.long()))]

    whole = torch.cat([rows_of(rank) for rank in range(3)])
    for floats, integers in ranks.run(gather):
        assert floats.equal(whole)
        assert integers.equal(whole.long())


def test_grouped_allgather_gathers_each_tensor(ranks: RankProcesses) -> None:
    def gather() -> list[torch.Tensor]:
        return hvd.grouped_allgather([torch.tensor([hvd.rank()]), torch.ones(2)])

    for numbers, ones in ranks.run(gather):
        assert numbers.tolist() == [0, 1, 2]
        assert ones.equal(torch.ones(6))


def test_broadcast_returns_the_tensor_of_the_root(ranks: RankProcesses) -> None:
    def send() -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.full((2,), float(hvd.rank()))
        return hvd.broadcast(own, root_rank=2), own

    for rank, (received, own) in enumerate(ranks.run(send)):
        assert received.equal(torch.full((2,), 2.0))
        assert own.equal(torch.full((2,), float(rank))), "the argument is not changed"


def test_broadcast_in_place_changes_tensors_of_any_layout(ranks: RankProcesses) -> None:
    def send() -> tuple[torch.Tensor, torch.nn.Parameter]:
        transposed = (torch.arange(6.0).reshape(2, 3) * (hvd.rank() + 1)).T
        parameter = torch.nn.Parameter(torch.tensor(float(hvd.rank())))
        handle = hvd.broadcast_async_(parameter, root_rank=1)
        assert hvd.broadcast_(transposed, root_rank=1) is transposed
        assert hvd.synchronize(handle) is parameter
        return transposed, parameter

    for transposed, parameter in ranks.run(send):
        assert transposed.equal(torch.arange(6.0).reshape(2, 3).T * 2)
        assert parameter.item() == 1.0


def test_alltoall_without_splits_sends_equal_parts(ranks: RankProcesses) -> None:
    def exchange() -> Any:
        return hvd.alltoall(torch.arange(6) + 10 * hvd.rank())

    received = [one.tolist() for one in ranks.run(exchange)]
    assert received == [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23], [4, 5, 14, 15, 24, 25]]


def test_alltoall_with_splits_returns_the_received_splits(ranks: RankProcesses) -> None:
    splits = [[1, 0, 2], [0, 3, 0], [2, 1, 1]]

    def exchange() -> Any:
        own = splits[hvd.rank()]
        rows = torch.full((sum(own), 2), float(hvd.rank()))
        return hvd.alltoall(rows, splits=torch.tensor(own))

    for rank, (rows, received) in enumerate(ranks.run(exchange)):
        assert received.tolist() == [one[rank] for one in splits]
        expected = [float(sender) for sender in range(3) for _ in range(splits[sender][rank])]
        assert rows.tolist() == [[value, value] for value in expected]


def test_objects_of_any_kind_are_exchanged(ranks: RankProcesses) -> None:
    def exchange() -> tuple[Any, list[Any]]:
        own = {"rank": hvd.rank(), "square": lambda x: x * x}
        root = hvd.broadcast_object(own, root_rank=1)
        return (root["rank"], root["square"](3)), hvd.allgather_object("x" * hvd.rank())

    assert ranks.run(exchange) == [((1, 9), ["", "x", "xx"])] * 3


def test_gradients_of_a_gathered_tensor_are_averaged(ranks: RankProcesses) -> None:
    def differentiate() -> torch.Tensor | None:
        own = torch.ones(hvd.rank() + 1, requires_grad=True)
        (hvd.allgather(own) * torch.arange(6.0) * (hvd.rank() + 1)).sum().backward()  # type: ignore[no-untyped-call]
        return own.grad

    # Rank r multiplies by r + 1: 2 on average.
    gradients = [one.tolist() for one in ranks.run(differentiate)]
    assert gradients == [[0.0], [2.0, 4.0], [6.0, 8.0, 10.0]]


def test_gradients_of_a_broadcast_reach_the_root_only(ranks: RankProcesses) -> None:
    def differentiate() -> torch.Tensor | None:
        own = torch.ones(2, requires_grad=True)
        (hvd.broadcast(own, root_rank=1) * (hvd.rank() + 1)).sum().backward()  # type: ignore[no-untyped-call]
        return own.grad

    assert [one.tolist() for one in ranks.run(differentiate)] == [[0, 0], [2, 2], [0, 0]]


def test_gradients_of_alltoall_return_to_the_sender(ranks: RankProcesses) -> None:
    def differentiate() -> torch.Tensor | None:
        own = torch.ones(6, requires_grad=True)
        received = hvd.alltoall(own, splits=[1, 2, 3])[0]
        (received * (hvd.rank() + 1)).sum().backward()  # type: ignore[no-untyped-call]
        return own.grad

    for gradient in ranks.run(differentiate):
        assert gradient.tolist() == [1, 2, 2, 3, 3, 3]


def test_ranks_of_a_process_set_work_among_themselves(ranks: RankProcesses) -> None:
    def work() -> Any:
        pair = hvd.add_process_set([2, 0])
        try:
            if hvd.rank() == 1:
                return pair.included(), pair.rank(), None
            own = torch.tensor([float(hvd.rank() + 1)])
            total = hvd.allreduce(own, process_set=pair)
            rows = hvd.allgather(own, process_set=pair)
            sent = hvd.broadcast(own, root_rank=2, process_set=pair)
            return pair.rank(), pair.size(), [total.item(), rows.tolist(), sent.item()]
        finally:
            assert hvd.remove_process_set(pair)

    values = [2.0, [1.0, 3.0], 3.0]
    assert ranks.run(work) == [(0, 2, values), (False, None, None), (1, 2, values)]


@pytest.mark.usefixtures("alone")
def test_one_rank_alone_receives_its_own_values() -> None:
    own = torch.arange(4.0)
    assert hvd.allgather(own).equal(own)
    assert hvd.broadcast(own, root_rank=0).equal(own)
    assert hvd.alltoall(own).equal(own)  # type: ignore[union-attr]  # a tensor without splits
    assert hvd.broadcast_object("x") == "x"
    assert hvd.allgather_object("x") == ["x"]
    hvd.barrier()


@pytest.mark.usefixtures("alone")
def test_a_gradient_of_one_rank_alone_is_its_own() -> None:
    own = torch.ones(3, requires_grad=True)
    (hvd.allgather(hvd.broadcast(own, root_rank=0)) * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    assert own.grad.tolist() == [2, 2, 2]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hvd.allgather(torch.tensor(1.0)), "at least one dimension"),
        (lambda: hvd.broadcast(torch.ones(1), root_rank=1), "root_rank=1"),
        (lambda: hvd.alltoall(torch.ones(3), splits=[2]), "do not match"),
        (lambda: hvd.barrier(hvd.ProcessSet([0])), "was not added"),
    ],
)
def test_invalid_arguments_are_rejected(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
