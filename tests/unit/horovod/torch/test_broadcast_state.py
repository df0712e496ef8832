"""The state of models and optimizers is that of one rank on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spotfit.horovod.torch as hvd
from spotfit.core.errors import ConfigError
from tests.unit.horovod.rank_processes import RankProcesses


@pytest.mark.parametrize("kind", ["state_dict", "named_parameters", "parameters"])
def test_parameters_are_those_of_the_root(ranks: RankProcesses, kind: str) -> None:
    def send() -> tuple[dict[str, Any], dict[str, Any]]:
        torch.manual_seed(hvd.rank())
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        hvd.broadcast_parameters(getattr(model, kind)(), root_rank=1)
        return before, dict(model.state_dict())

    results = ranks.run(send)
    for _, after in results:
        torch.testing.assert_close(after, results[1][0], rtol=0, atol=0)


def test_values_that_are_no_tensors_are_sent_too(ranks: RankProcesses) -> None:
    def send() -> dict[str, Any]:
        state = {"weight": torch.tensor([hvd.rank()]), "name": f"rank {hvd.rank()}"}
        hvd.broadcast_parameters(state, root_rank=2)
        return state

    assert ranks.run(send) == [{"weight": torch.tensor([2]), "name": "rank 2"}] * 3


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS])
def test_an_optimizer_without_state_receives_that_of_the_root(
    ranks: RankProcesses, kind: Any
) -> None:
    def send() -> tuple[Any, Any]:
        weight = torch.nn.Parameter(torch.ones(3))
        frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        parameters = [weight] if kind is torch.optim.LBFGS else [weight, frozen]
        optimizer = kind(parameters, lr=0.1 * (hvd.rank() + 1), **options)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (weight * weight).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        if hvd.rank() == 0:
            optimizer.step(closure)
        before = optimizer.state_dict()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return before, optimizer.state_dict()

    results = ranks.run(send)
    root = results[0][0]
    assert root["state"]
    for _, after in results:
        torch.testing.assert_close(after["state"], root["state"], rtol=0, atol=0)
        assert after["param_groups"] == root["param_groups"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("params", [torch.ones(1), 5, "weights"])
def test_other_values_are_rejected(params: Any) -> None:
    with pytest.raises(ConfigError, match="takes parameters, not"):
        hvd.broadcast_parameters(params, root_rank=0)


@pytest.mark.usefixtures("alone")
def test_one_rank_alone_keeps_its_state() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    hvd.broadcast_parameters([weight], root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert weight.tolist() == [1, 1, 1]
    assert weight.grad is None, "no step is made to create the state"
