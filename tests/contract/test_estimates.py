"""`trainer.estimate()` with options of backends that list on-demand offers for comparison only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.client.run_config import RunConfig
from spotfit.client.trainer import DataParallelTrainer
from spotfit.core.errors import ConfigError
from spotfit.model.offer import Market
from spotfit_localsim.clouds.provisioner import SimProvisioner

pytestmark = pytest.mark.real_time("a simulated cloud runs in real time")

SPOT_ONLY = {
    "aws_batch": "on_demand_queues=[]",
    "azure_batch": "identity=&pool=spot-pool",
}
REASONS = {"aws_batch": "on_demand_queues", "azure_batch": "the nodes of the pool 'spot-pool'"}
MODULES = {"aws_batch": "boto3", "azure_batch": "azure.batch"}


class EstimatedCloud:
    """A simulated cloud, and trainers whose machines it would rent."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.storage = folder / "runs"
        self.sim = SimProvisioner.with_options(cloud=name, root=str(folder / "cloud"), idle_s=60.0)

    def trainer(self, options: str, **run: Any) -> DataParallelTrainer:
        return DataParallelTrainer(
            print,
            run_config=RunConfig(
                name="n", storage_path=str(self.storage), training_time_s="2h", **run
            ),
            provisioner=f"sim://{self.name}?root={self.sim.root}&idle_s=60&{options}",
        )


@pytest.fixture(params=sorted(SPOT_ONLY))
def cloud(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EstimatedCloud]:
    pytest.importorskip(MODULES[request.param])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cloud = EstimatedCloud(request.param, tmp_path)
    yield cloud
    cloud.sim.call_simulator("leave")


def test_offers_for_comparison_are_in_the_table_only(cloud: EstimatedCloud) -> None:
    found = cloud.trainer(SPOT_ONLY[cloud.name]).estimate()
    rentable = {one.offer.market: one.is_rentable for one in found.offers}
    assert rentable == {Market.SPOT: True, Market.ON_DEMAND: False}
    spot = found.offers[0]
    assert spot.on_demand_usd is not None
    assert found.worst_case_usd is not None
    assert found.worst_case_usd < spot.on_demand_usd
    assert (found.earliest_deadline_s, found.rejections) == (None, ())
    assert any(REASONS[cloud.name] in remark for remark in found.remarks)


def test_a_deadline_without_rentable_on_demand_machines_is_rejected(cloud: EstimatedCloud) -> None:
    trainer = cloud.trainer(SPOT_ONLY[cloud.name], deadline="9h")
    found = trainer.estimate()
    assert not found.is_guaranteed
    with pytest.raises(ConfigError) as rejected:
        trainer.fit()
    assert found.rejections == (rejected.value.message,)
    assert REASONS[cloud.name] in rejected.value.message


def test_rentable_on_demand_machines_guarantee_a_deadline(cloud: EstimatedCloud) -> None:
    found = cloud.trainer("", deadline="9h").estimate()
    assert all(one.is_rentable for one in found.offers)
    assert (found.is_guaranteed, found.rejections) == (True, ())
