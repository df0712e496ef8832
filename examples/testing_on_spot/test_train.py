"""What a spot market does to our training, tried out before it costs anything: `pytest`.

`pytest --spot-cloud=aws_batch` (gcp_batch, kubernetes, …) runs the same on another cloud, through
the client library that its real provisioner uses.
"""

from unittest.mock import ANY

import pytest
from train import main

import spotfit
from spotfit_localsim.pytest_plugin import ReclaimAt, SpotCloud


def test_a_reclaimed_machine_changes_nothing(spot_cloud: SpotCloud, reclaim_at: ReclaimAt) -> None:
    calm = main(12, spot_cloud.storage_path, name="calm")
    reclaim_at(step=5, rank=1)
    reclaim_at(step=9, rank=0, notice=False)
    stormy = main(12, spot_cloud.storage_path, name="stormy")
    assert spot_cloud.reclaimed == 2
    assert stormy.return_value == calm.return_value
    assert stormy.metrics == calm.metrics


@pytest.mark.spot_cloud(capacity=2)
def test_it_waits_for_machines_when_there_are_none(spot_cloud: SpotCloud) -> None:
    spot_cloud.refuse("capacity", times=3)
    assert main(3, spot_cloud.storage_path).metrics == {"epoch": 2, "step": 3, "loss": ANY}


def test_a_quota_that_is_too_small_is_told_and_nothing_is_paid(spot_cloud: SpotCloud) -> None:
    spot_cloud.refuse("quota", times=1_000)
    with pytest.raises(spotfit.TrainingFailedError, match="quota"):
        main(3, spot_cloud.storage_path)
    assert spot_cloud.machines() == []
