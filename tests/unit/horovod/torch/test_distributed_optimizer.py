"""DistributedOptimizer on three ranks, against DistributedDataParallel and plain gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import spotfit.horovod.torch as hvd
from spotfit.core.errors import ConfigError
from tests.unit.horovod.rank_processes import RankProcesses

STEPS = 4


class Branches(nn.Module):
    """Odd ranks do not use one of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.always = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows) if hvd.rank() % 2 else self.second(self.first(rows))
        scores: torch.Tensor = self.always(hidden.tanh())
        return scores


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 900), nn.Linear(900, 2))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 2, generator=generator)


def train(model: nn.Module, optimizer: Any, steps: int = STEPS) -> list[torch.Tensor]:
    """Return the gradients of the last step and the weights."""
    for step in range(steps):
        optimizer.zero_grad()
        rows, targets = batch(hvd.rank(), step)
        nn.functional.mse_loss(model(rows), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    parameters = list(model.parameters())
    return [one.grad for one in parameters if one.grad is not None] + [
        one.detach() for one in parameters
    ]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def expected_gradients(make: Any, loss_of: Any) -> list[torch.Tensor]:
    """Return the averages of the gradients of all ranks, computed in this process."""
    sums: list[torch.Tensor] = []
    for rank in range(3):
        model = make()
        loss_of(model, rank).backward()
        gradients = [
            torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()
        ]
        sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else gradients
    return [one / 3 for one in sums]


def test_weights_are_those_of_distributed_data_parallel(ranks: RankProcesses) -> None:
    def compare() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        own = train(model, optimizer)
        wrapped = nn.parallel.DistributedDataParallel(make_model())
        return own, train(wrapped, sgd(wrapped))

    for own, ddp in ranks.run(compare):
        torch.testing.assert_close(own, ddp, rtol=1e-5, atol=1e-7)


def test_weights_of_two_ranks_are_bit_equal_to_distributed_data_parallel(
    ranks: RankProcesses,
) -> None:
    def compare() -> bool:
        # Not removed: torch may block when DistributedDataParallel is the last user of a group.
        pair = hvd.add_process_set([0, 1])
        if hvd.rank() == 2:
            return True
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), process_set=pair)
        wrapped = nn.parallel.DistributedDataParallel(make_model(), process_group=pair.group)
        # The sum of two numbers and its half do not depend on the order.
        own, ddp = train(model, optimizer), train(wrapped, sgd(wrapped))
        return all(a.equal(b) for a, b in zip(own, ddp, strict=True))

    assert ranks.run(compare) == [True] * 3


def test_ranks_that_do_not_use_a_layer_take_part_with_zeros(ranks: RankProcesses) -> None:
    def make() -> Branches:
        torch.manual_seed(1)
        return Branches()

    def reduce() -> list[torch.Tensor]:
        model = make()
        optimizer = hvd.DistributedOptimizer(sgd(model), groups=[list(model.second.parameters())])
        model(batch(hvd.rank(), 0)[0]).sum().backward()
        optimizer.synchronize()
        return [one.grad for one in model.parameters() if one.grad is not None]

    results = ranks.run(reduce)
    assert results[0][2].abs().sum() > 0, "the second layer, which rank 1 has not used"
    for gradients in results[1:]:
        torch.testing.assert_close(gradients, results[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "rtol"),
    [
        ({"groups": 2}, 1e-5),
        ({"gradient_predivide_factor": 1.5}, 1e-5),
        ({"compression": hvd.Compression.fp16}, 3e-2),
    ],
    ids=["groups", "predivided", "fp16"],
)
def test_gradients_are_the_averages_of_all_ranks(
    ranks: RankProcesses, options: dict[str, Any], rtol: float
) -> None:
    def reduce() -> list[torch.Tensor]:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
        rows, targets = batch(hvd.rank(), 0)
        nn.functional.mse_loss(model(rows), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.synchronize()
        return [one.grad for one in model.parameters() if one.grad is not None]

    def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
        rows, targets = batch(rank, 0)
        return nn.functional.mse_loss(model(rows), targets)

    expected = expected_gradients(make_model, loss_of)
    for gradients in ranks.run(reduce):
        torch.testing.assert_close(gradients, expected, rtol=rtol, atol=1e-4)


def test_sums_are_not_divided(ranks: RankProcesses) -> None:
    def reduce() -> list[float]:
        weight = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
        (weight * (hvd.rank() + 1)).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        values: list[float] = weight.tolist()
        return values

    assert ranks.run(reduce) == [[-6.0, -6.0]] * 3


def test_gradients_of_several_passes_are_reduced_once(ranks: RankProcesses) -> None:
    def reduce() -> tuple[list[float], list[float]]:
        weight = nn.Parameter(torch.zeros(1))
        plain = torch.optim.SGD([weight], lr=1.0)
        optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=2)
        (weight * (hvd.rank() + 1)).sum().backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        before: list[float] = weight.grad.tolist()
        (weight * 10.0).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return before, weight.tolist()

    assert ranks.run(reduce) == [([rank + 1.0], [-12.0]) for rank in range(3)]


def test_more_passes_than_expected_are_rejected(ranks: RankProcesses) -> None:
    def reduce() -> str:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        weight.sum().backward()  # type: ignore[no-untyped-call]
        try:
            weight.sum().backward()  # type: ignore[no-untyped-call]
        except ConfigError as error:
            optimizer.synchronize()
            return str(error)
        return ""

    for message in ranks.run(reduce):
        assert "backward_passes_per_step=1" in message


def test_gradients_may_be_changed_before_the_step(ranks: RankProcesses) -> None:
    def clip() -> list[float]:
        weight = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        (weight * (hvd.rank() + 1)).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.synchronize()
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0, 2.0]
        nn.utils.clip_grad_value_([weight], 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
        values: list[float] = weight.tolist()
        return values

    assert ranks.run(clip) == [[-0.5, -0.5]] * 3


def test_zero_grad_is_rejected_while_gradients_are_reduced(ranks: RankProcesses) -> None:
    def zero() -> str:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        weight.sum().backward()  # type: ignore[no-untyped-call]
        try:
            optimizer.zero_grad()
        except ConfigError as error:
            optimizer.step()
            optimizer.zero_grad()
            return str(error)
        return ""

    for message in ranks.run(zero):
        assert "between loss.backward() and optimizer.step()" in message


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients_are_reduced(ranks: RankProcesses, sparse_as_dense: bool) -> None:
    def reduce() -> tuple[bool, torch.Tensor]:
        table = nn.Embedding(4, 2, sparse=True)
        nn.init.zeros_(table.weight)
        plain = torch.optim.SGD(table.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(plain, sparse_as_dense=sparse_as_dense)
        (table(torch.tensor([hvd.rank(), 3])) * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
        assert table.weight.grad is not None
        return table.weight.grad.is_sparse, table.weight.detach()

    expected = -torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [6.0, 6.0]]) / 3
    for is_sparse, weight in ranks.run(reduce):
        assert is_sparse
        torch.testing.assert_close(weight, expected)


def test_a_closure_sees_the_gradients_of_all_ranks(ranks: RankProcesses) -> None:
    def minimize() -> list[float]:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS([weight], lr=1.0, max_iter=20))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = ((weight - hvd.rank()) ** 2).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        for _ in range(5):
            optimizer.step(closure)
        values: list[float] = weight.tolist()
        return values

    # The mean of 0, 1 and 2 minimizes the sum of the three losses.
    for (value,) in ranks.run(minimize):
        assert value == pytest.approx(1.0, abs=1e-3)


def test_reductions_start_during_the_backward_pass(ranks: RankProcesses) -> None:
    def observe() -> list[int]:
        import torch.distributed as dist

        layers = [nn.Linear(600, 600) for _ in range(4)]
        model = nn.Sequential(*layers)
        hvd.DistributedOptimizer(sgd(model), groups=4)
        started, reduce = 0, dist.all_reduce

        def count(*args: Any, **options: Any) -> Any:
            nonlocal started
            started += 1
            return reduce(*args, **options)

        seen: list[int] = []
        layers[0].weight.register_hook(lambda _: seen.append(started))  # type: ignore[no-untyped-call]
        dist.all_reduce = count
        try:
            model(torch.ones(1, 600)).sum().backward()
        finally:
            dist.all_reduce = reduce
        return [*seen, started]

    # An announcement and a reduction per bucket; the first layer is the last bucket.
    assert ranks.run(observe) == [[6, 8]] * 3


@pytest.mark.usefixtures("alone")
def test_the_optimizer_keeps_its_class_state_and_scheduler() -> None:
    weight = nn.Parameter(torch.ones(1))
    plain = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    weight.sum().backward()  # type: ignore[no-untyped-call]
    plain.step()
    scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.1)
    optimizer = hvd.DistributedOptimizer(plain, [("weight", weight)])
    assert isinstance(optimizer, torch.optim.SGD)
    optimizer.zero_grad()
    weight.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    scheduler.step()
    assert weight.item() == 1.0 - 1.0 - 1.5, "with the momentum of the first step"
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.usefixtures("alone")
def test_a_scheduler_of_the_distributed_optimizer_warns_of_nothing() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    weight.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.usefixtures("alone")
def test_synchronizing_twice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    weight.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.synchronize()
    optimizer.step()
    assert "horovod.synchronized_twice" in caplog.text


def _wrap(**options: Any) -> Any:
    model = nn.Linear(2, 2)
    return hvd.DistributedOptimizer(sgd(model), **options)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": hvd.Adasum}, "Adasum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op=hvd.Average"),
        ({"gradient_predivide_factor": -1.0}, "positive"),
        ({"backward_passes_per_step": 0}, "greater than 0"),
        ({"named_parameters": [("weight", nn.Parameter(torch.ones(1)))]}, "lacks 2 of"),
        ({"named_parameters": [nn.Parameter(torch.ones(1))]}, "tuples"),
        ({"named_parameters": [("w", torch.ones(1)), ("w", torch.ones(1))]}, "several"),
    ],
)
def test_invalid_arguments_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _wrap(**options)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrapped", [lambda: _wrap(), lambda: "optimizer"])
def test_only_optimizers_are_wrapped_and_only_once(wrapped: Any) -> None:
    with pytest.raises(ConfigError, match="takes an optimizer of torch"):
        hvd.DistributedOptimizer(wrapped())
