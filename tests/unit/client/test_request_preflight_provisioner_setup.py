"""Opening the provisioner of a request, and prewarming its backend."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from spotfit.client import request
from spotfit.client.request import plan_group, prewarm_backend
from spotfit.client.trainer import DataParallelTrainer
from spotfit.core.errors import ConfigError, SpotfitError, StoreError
from spotfit.model.config import ScalingConfig
from spotfit.model.group import GroupPlan
from tests.unit.client.test_request import a_request
from tests.unit.control.fake_provisioner import FakeProvisioner


class WarmCloud(FakeProvisioner):
    """Records prewarm requests and their end."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.events: list[str] = []
        self.error = error

    @contextmanager
    def prewarm(
        self, plan: GroupPlan, framework: str, preload: Sequence[str] = ()
    ) -> Iterator[None]:
        self.events.append(f"{plan.num_nodes} with {' '.join([framework, *preload])}")
        if self.error is not None:
            raise self.error
        try:
            yield
        finally:
            self.events.append("released")


def use_cloud(monkeypatch: pytest.MonkeyPatch, cloud: FakeProvisioner) -> None:
    monkeypatch.setattr(request, "open_provisioner", lambda *_: cloud)


def test_the_plan_is_for_the_maximum_number_of_workers() -> None:
    found = plan_group(a_request(scaling=ScalingConfig(num_workers=(2, 6)), provisioner="local"))
    assert found.provisioner.name == "local"
    assert found.plan.num_nodes * found.plan.slots_per_node == 6


def test_the_backend_is_prewarmed_within_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cloud = WarmCloud()
    use_cloud(monkeypatch, cloud)
    scaling = ScalingConfig(num_workers=3)
    with prewarm_backend(a_request(scaling=scaling, framework="torch", preload=("sklearn",))):
        assert cloud.events == ["3 with torch sklearn"]
    assert cloud.events == ["3 with torch sklearn", "released"]


def test_an_error_ends_prewarming(monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = WarmCloud()
    use_cloud(monkeypatch, cloud)
    with pytest.raises(StoreError), prewarm_backend(a_request()):
        raise StoreError("the bucket is away")
    assert cloud.events[-1] == "released"


def test_a_backend_without_prewarming_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cloud(monkeypatch, FakeProvisioner())
    with prewarm_backend(a_request()):
        pass


@pytest.mark.parametrize("error", [ConfigError("no"), OSError("no process")])
def test_prewarm_errors_are_ignored(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = WarmCloud(error)
    use_cloud(monkeypatch, cloud)
    with prewarm_backend(a_request()):
        assert len(cloud.events) == 1, "the backend was asked, and failed"


def test_an_unknown_provisioner_is_reported_by_the_checks() -> None:
    request = a_request(provisioner="clouds_that_are_not_there")
    with prewarm_backend(request):
        pass
    with pytest.raises(ConfigError):
        plan_group(request)


def test_a_trainer_prewarms_while_its_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from spotfit.client import fit as fitting

    cloud, events_at_start = WarmCloud(), []
    use_cloud(monkeypatch, cloud)

    def begin(*_: Any, **__: Any) -> Any:
        events_at_start.append(list(cloud.events))
        raise SpotfitError("that will do")

    monkeypatch.setattr(fitting, "start_run", begin)
    with pytest.raises(SpotfitError):
        DataParallelTrainer(lambda: None, scaling_config=ScalingConfig(num_workers=2)).fit()
    assert events_at_start == [["2 with none"]]
    assert cloud.events == ["2 with none", "released"]
