"""hvd.elastic.run outside of workers, and in local mode. tests/live has the restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import spotfit
import spotfit.horovod.torch as hvd
from spotfit.core.errors import ConfigError
from spotfit.horovod import HorovodTrainer
from tests.unit.horovod.rank_processes import RankProcesses


def test_the_function_begins_with_the_state_of_rank_0(ranks: RankProcesses) -> None:
    def work() -> list[int]:
        @hvd.elastic.run
        def train(state: Any, factor: int, *, offset: int) -> list[int]:
            state.step += 1
            state.commit()
            return [state.step, state.step * factor + offset]

        state = hvd.elastic.ObjectState(step=hvd.rank() + 5)
        values: list[int] = train(state, 2, offset=1)
        return values

    assert ranks.run(work) == [[6, 13]] * 3


@pytest.mark.usefixtures("alone")
def test_the_decorator_takes_the_interval_of_saves() -> None:
    @hvd.elastic.run(every=3)
    def train(state: Any) -> int:
        """Train."""
        return 7

    assert train(hvd.elastic.ObjectState()) == 7
    assert train.__doc__ == "Train."


@pytest.mark.usefixtures("alone")
def test_the_first_argument_must_be_a_state() -> None:
    @hvd.elastic.run
    def train(state: Any) -> None:
        """Never called."""

    with pytest.raises(ConfigError, match="not a state"):
        train({"epoch": 1})


def test_commits_are_counted_in_local_mode(tmp_path: Path) -> None:
    def train() -> list[Any]:
        hvd.init()
        try:
            state = hvd.elastic.TorchState(nn.Linear(1, 1), epoch=0)

            @hvd.elastic.run(every=2)
            def loop(state: Any) -> None:
                for state.epoch in range(3):
                    state.commit()

            loop(state)
            with pytest.raises(ConfigError, match="End the function with an exception"):
                state.restore()
            return [hvd.size(), state.epoch]
        finally:
            hvd.shutdown()

    trainer = HorovodTrainer(
        train,
        scaling_config=spotfit.ScalingConfig(num_workers=0),
        run_config=spotfit.RunConfig(name="run", storage_path=str(tmp_path)),
    )
    assert trainer.fit().return_value == [1, 2]
