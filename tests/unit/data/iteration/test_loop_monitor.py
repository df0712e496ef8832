"""Each warning about a training loop is logged once, on one rank."""

from __future__ import annotations

import pytest

from spotfit.data.iteration.loop_monitor import TrainingLoopMonitor


@pytest.fixture
def monitor() -> TrainingLoopMonitor:
    monitor = TrainingLoopMonitor()
    monitor.is_reporting_rank = monitor.counts_batches = monitor.expects_epoch_saves = True
    return monitor


def test_more_trained_than_yielded_batches_are_logged_once(
    monitor: TrainingLoopMonitor, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor.check_batch_counts(2, 2)
    assert not capsys.readouterr().err
    monitor.check_batch_counts(2, 3)
    monitor.check_batch_counts(2, 4)
    assert capsys.readouterr().err.count("checkpoint.loader_mismatch") == 1


def test_an_epoch_that_ends_early_is_logged_once(
    monitor: TrainingLoopMonitor, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor.check_epoch_end(0, 0, 5)
    assert not capsys.readouterr().err
    monitor.check_epoch_end(3, 3, 5)
    monitor.check_epoch_end(3, 3, 5)
    assert capsys.readouterr().err.count("checkpoint.epoch_end_missed") == 1


def test_other_ranks_log_nothing(
    monitor: TrainingLoopMonitor, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor.is_reporting_rank = False
    monitor.check_batch_counts(2, 3)
    monitor.check_epoch_end(3, 3, 5)
    assert not capsys.readouterr().err
