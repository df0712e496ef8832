"""Test a training under preemptions on a simulated spot cloud, with `pytest`.

`pytest --spot-cloud=aws_batch` (gcp_batch, kubernetes, …) runs the tests on another simulated
cloud, through the client library that its provisioner uses.
"""

from unittest.mock import ANY

import pytest
from train import main

import spotfit
from spotfit_localsim.pytest_plugin import ReclaimAt, SpotCloud


def test_preempted_machines_do_not_change_the_result(
    spot_cloud: SpotCloud, reclaim_at: ReclaimAt
) -> None:
    uninterrupted = main(12, spot_cloud.storage_path, name="uninterrupted")
    reclaim_at(step=5, rank=1)
    reclaim_at(step=9, rank=0, notice=False)
    preempted = main(12, spot_cloud.storage_path, name="preempted")
    assert spot_cloud.reclaimed_count == 2
    assert preempted.return_value == uninterrupted.return_value
    assert preempted.metrics == uninterrupted.metrics


@pytest.mark.spot_cloud(capacity=2)
def test_run_waits_for_capacity(spot_cloud: SpotCloud) -> None:
    spot_cloud.fail_requests("capacity", times=3)
    assert main(3, spot_cloud.storage_path).metrics == {"epoch": 2, "step": 3, "loss": ANY}


def test_exceeded_quota_fails_the_run_without_machines(spot_cloud: SpotCloud) -> None:
    spot_cloud.fail_requests("quota", times=1_000)
    with pytest.raises(spotfit.TrainingFailedError, match="quota"):
        main(3, spot_cloud.storage_path)
    assert spot_cloud.machines() == []
