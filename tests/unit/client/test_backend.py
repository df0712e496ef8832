"""Which backend a request names, and when its machines may begin to warm up."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from spotfit.client import backend
from spotfit.client.backend import planned, warmed
from spotfit.client.trainer import DataParallelTrainer
from spotfit.core.errors import ConfigError, SpotfitError, StoreError
from spotfit.model.config import ScalingConfig
from spotfit.model.group import GroupPlan
from tests.unit.client.test_request import a_request
from tests.unit.control.paper import PaperCloud


class WarmCloud(PaperCloud):
    """It tells what it was asked to warm, and when it was to stop."""

    def __init__(self, trouble: Exception | None = None) -> None:
        super().__init__()
        self.told: list[str] = []
        self.trouble = trouble

    @contextmanager
    def warming(self, plan: GroupPlan, framework: str) -> Iterator[None]:
        self.told.append(f"{plan.nodes} with {framework}")
        if self.trouble is not None:
            raise self.trouble
        try:
            yield
        finally:
            self.told.append("let go")


def give(monkeypatch: pytest.MonkeyPatch, cloud: PaperCloud) -> None:
    monkeypatch.setattr(backend, "open_provisioner", lambda *_: cloud)


def test_the_plan_is_that_of_the_whole_run() -> None:
    found = planned(a_request(scaling=ScalingConfig(num_workers=(2, 6)), provisioner="local"))
    assert found.provisioner.name == "local"
    assert found.plan.nodes * found.plan.slots == 6


def test_machines_are_warm_from_the_first_moment_to_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cloud = WarmCloud()
    give(monkeypatch, cloud)
    with warmed(a_request(scaling=ScalingConfig(num_workers=3), framework="torch")):
        assert cloud.told == ["3 with torch"]
    assert cloud.told == ["3 with torch", "let go"]


def test_an_error_on_the_way_lets_them_go(monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = WarmCloud()
    give(monkeypatch, cloud)
    with pytest.raises(StoreError), warmed(a_request()):
        raise StoreError("the bucket is away")
    assert cloud.told[-1] == "let go"


def test_a_backend_need_not_know_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, PaperCloud())
    with warmed(a_request()):
        pass


@pytest.mark.parametrize("trouble", [ConfigError("no"), OSError("no process")])
def test_what_cannot_get_warm_stops_nobody(
    trouble: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, WarmCloud(trouble))
    with warmed(a_request()):
        pass


def test_an_unknown_backend_is_for_the_checks_to_tell() -> None:
    request = a_request(provisioner="clouds_that_are_not_there")
    with warmed(request):
        pass
    with pytest.raises(ConfigError):
        planned(request)


def test_a_trainer_keeps_them_warm_while_its_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    from spotfit.client import fit as fitting

    cloud, told_then = WarmCloud(), []
    give(monkeypatch, cloud)

    def begin(*_: Any, **__: Any) -> Any:
        told_then.append(list(cloud.told))
        raise SpotfitError("that will do")

    monkeypatch.setattr(fitting, "begin", begin)
    with pytest.raises(SpotfitError):
        DataParallelTrainer(lambda: None, scaling_config=ScalingConfig(num_workers=2)).fit()
    assert told_then == [["2 with none"]]
    assert cloud.told == ["2 with none", "let go"]
