"""`barrier` and `broadcast_from_rank_zero` between real workers, and mismatched calls."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit import collective
from spotfit.core.errors import CollectiveTimeoutError, SessionMisuseError
from tests.live.cloud import LiveTestCloud

Config = dict[str, Any]
LONG_S = 600.0


def rank() -> int:
    return spotfit.get_context().get_world_rank()


def test_barrier_and_broadcast_synchronize_all_ranks(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> Any:
        Path(config["marks"], str(os.getpid())).touch()
        collective.barrier()
        assert len(list(Path(config["marks"]).iterdir())) == 3
        raised = [collective.broadcast_from_rank_zero((rank(), n)) for n in range(3)]
        assert raised == [(0, n) for n in range(3)]
        return collective.broadcast_from_rank_zero({"seed": rank()})

    assert cloud.fit(train, workers=3, nodes=2).return_value == {"seed": 0}


def test_missing_rank_is_logged_and_named_in_the_error(
    cloud: LiveTestCloud, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_TRAIN_COLLECTIVE_TIMEOUT_S", "1.5")
    monkeypatch.setenv("SPOTFIT_COLLECTIVE_WARN_INTERVAL_S", "0.5")

    def train() -> None:
        if rank() == 1:
            time.sleep(LONG_S)
        collective.barrier()

    with pytest.raises(spotfit.WorkerGroupError, match=r"have not joined: \[1\]") as raised:
        cloud.fit(train, workers=3)

    assert raised.value.worker_failures
    for error in raised.value.worker_failures.values():
        assert isinstance(error, CollectiveTimeoutError)
    assert "(rank 0)" in (output := capfd.readouterr().out)
    assert "collective.waiting operation=barrier missing_ranks=1" in output


@pytest.mark.parametrize("mismatch", ["another call", "no call"])
def test_mismatched_collective_fails_at_once(cloud: LiveTestCloud, mismatch: str) -> None:
    def train() -> None:
        if rank() == 0:
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = spotfit.Checkpoint.from_directory(folder)
                spotfit.report({}, checkpoint=checkpoint)
        elif mismatch == "another call":
            collective.barrier()

    with pytest.raises(spotfit.WorkerGroupError) as raised:
        cloud.fit(train, workers=2)

    error = next(
        iter(raised.value.worker_failures.values())
    )  # one of the two: the other may have been ended first
    assert isinstance(error, SessionMisuseError)
    assert ("rank 1 in barrier" if mismatch == "another call" else "rank 1 returned") in str(error)
