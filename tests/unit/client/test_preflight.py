"""Preflight: whatever can be known to fail is told before a machine is paid for, all at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from spotfit.client import backend, preflight
from spotfit.client.config import RunConfig
from spotfit.client.preflight import clear
from spotfit.client.request import FitRequest
from spotfit.core.errors import (
    ConfigError,
    ConfigErrors,
    EnvironmentMismatchError,
    SpotfitError,
    StoreError,
    StorePermissionError,
    TransientStoreError,
    UntrustworthyStoreError,
)
from spotfit.frameworks.config import BackendConfig
from spotfit.host import clocks
from spotfit.model.callbacks import UserCallback
from spotfit.model.config import ScalingConfig
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.model.software import Software
from spotfit.model.validation import ValidationConfig
from spotfit.store.api import Store
from spotfit.store.local import LocalStore
from spotfit.testing.clock import ManualClock
from tests.unit.client.test_request import a_request
from tests.unit.control.paper import PaperCloud


def two_parameters(config: Any, more: Any) -> None:
    """Nobody could call it."""


def test_a_request_that_may_take_off_is_rooted_at_its_run(tmp_path: Path) -> None:
    cleared = clear(a_request(run=RunConfig(name="digits", storage_path=str(tmp_path))))
    assert cleared.name == "digits"
    assert cleared.store.url.endswith("/digits")
    assert cleared.provisioner.name == "local"
    assert list(cleared.store.list()) == [], "the probe leaves nothing behind"


def test_a_run_without_a_name_keeps_the_one_it_was_given_at_once(tmp_path: Path) -> None:
    request = a_request(run=RunConfig(storage_path=str(tmp_path)))
    one, again = clear(request), clear(request)
    assert one.name == again.name == request.run.name, "fitted again, it goes on"


def test_callbacks_that_the_environment_names_come_before_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = UserCallback()
    run = RunConfig(name="digits", storage_path=str(tmp_path), callbacks=[mine])
    monkeypatch.setenv("SPOTFIT_CALLBACKS", "spotfit.model.callbacks.UserCallback")
    cleared = clear(a_request(run=run))
    assert cleared.run.callbacks is not None
    assert len(cleared.run.callbacks) == 2
    assert cleared.run.callbacks[-1] is mine
    assert run.callbacks == [mine], "what the user holds stays as it is"


def test_mistakes_of_the_environment_are_told_before_anything_is_rented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_COLLECTIVE_TIMEOUT_S", "soon")
    monkeypatch.setenv("SPOTFIT_PORT", "99999")
    with pytest.raises(ConfigErrors) as refused:
        clear(a_request(two_parameters, run=RunConfig("digits", str(tmp_path))))
    assert len(refused.value.errors) == 3


def test_what_has_no_effect_is_told_with_what_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "0")
    scaling = ScalingConfig(placement_strategy="SPREAD", label_selector={"zone": "a"})
    clear(a_request(run=RunConfig("digits", str(tmp_path)), scaling=scaling))
    said = capsys.readouterr().err
    for name in ("RAY_TRAIN_V2_ENABLED", "placement_strategy", "label_selector"):
        assert f"no_effect of={name} what_holds=" in said


class Odd(BackendConfig):
    """Names no backend."""

    @property
    def backend_cls(self) -> Any:
        return print


def test_a_backend_that_is_none_is_told(tmp_path: Path) -> None:
    run = RunConfig(name="digits", storage_path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"Odd\.backend_cls"):
        clear(a_request(run=run, backend_config=Odd()))


def test_all_mistakes_are_told_at_once() -> None:
    request = a_request(
        two_parameters,
        run=RunConfig(
            name="../up",
            storage_path="nowhere://bucket",
            worker_runtime_env={"condaa": {}},
        ),
        provisioner="lokal",
    )
    with pytest.raises(ConfigErrors) as refused:
        clear(request)
    told = str(refused.value)
    assert told.startswith("5 things stand in the way")
    for word in ("two_parameters", "../up", "nowhere", "condaa", "Did you mean 'local'?"):
        assert word in told
    assert all(isinstance(one, ConfigError) for one in refused.value.errors)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"fn": two_parameters}, "0 or 1 required arguments"),
        ({"provisioner": "local?nodez=2"}, "nodez"),
        ({"provisioner": "local?nodes=0"}, "nodes"),
        ({"name": "a/b"}, "The run's name"),
        ({"name": "a..b"}, "The run's name"),
    ],
)
def test_a_single_mistake_comes_as_itself(tmp_path: Path, given: Any, says: str) -> None:
    run = RunConfig(name=given.pop("name", "digits"), storage_path=str(tmp_path))
    with pytest.raises(SpotfitError, match=says) as refused:
        clear(a_request(run=run, **given))
    assert not isinstance(refused.value, ConfigErrors)


def test_a_storage_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    request = a_request(run=RunConfig(name="n", storage_path=str(tmp_path / "file")))
    with pytest.raises(SpotfitError) as refused:
        clear(request)
    assert "file" in str(refused.value)


def test_a_bucket_whose_create_lies_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(LocalStore, "create", LocalStore.put)
    with pytest.raises(UntrustworthyStoreError):
        clear(a_request(run=RunConfig(name="n", storage_path=str(tmp_path))))


def test_what_lives_in_this_process_only_is_no_storage() -> None:
    with pytest.raises(ConfigError, match="lives in this process only") as refused:
        clear(a_request(run=RunConfig(name="n", storage_path="memory://here")))
    assert "num_workers=0" in refused.value.do


@pytest.mark.parametrize("scheme", ["elsewhere", "file"])
def test_a_file_system_that_machines_cannot_reach_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str
) -> None:
    memory = pytest.importorskip("fsspec.implementations.memory")
    private = type("Private", (memory.MemoryFileSystem,), {"protocol": scheme})()
    monkeypatch.setattr(preflight, "probe_create", lambda _store: None)
    run = RunConfig(name="n", storage_path=str(tmp_path), storage_filesystem=private)
    with pytest.raises(ConfigError, match="achines could not reach"):
        clear(a_request(run=run))


def a_probe_that_fails(*errors: StoreError) -> tuple[Callable[[Store], None], list[StoreError]]:
    """A probe that raises these, one each time, then is content; and those still to come."""
    to_come = list(errors)

    def probe(_store: Store) -> None:
        if to_come:
            raise to_come.pop(0)

    return probe, to_come


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock()
    monkeypatch.setattr(clocks, "SystemClock", lambda: clock)
    return clock


def test_a_bucket_that_stumbles_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: ManualClock
) -> None:
    probe, to_come = a_probe_that_fails(*[TransientStoreError("no answer")] * 4)
    monkeypatch.setattr(preflight, "probe_create", probe)
    begun = clock.now()
    clear(a_request(run=RunConfig(name="n", storage_path=str(tmp_path))))
    assert to_come == []
    assert clock.now() - begun == pytest.approx(3.7)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("errors", "left"),
    [([TransientStoreError("no answer")] * 9, 4), ([StorePermissionError("not yours")] * 9, 8)],
    ids=["it never answers", "it will not"],
)
def test_but_not_for_ever_and_not_where_it_is_no_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, errors: list[StoreError], left: int
) -> None:
    probe, to_come = a_probe_that_fails(*errors)
    monkeypatch.setattr(preflight, "probe_create", probe)
    with pytest.raises(type(errors[0])):
        clear(a_request(run=RunConfig(name="n", storage_path=str(tmp_path))))
    assert len(to_come) == left


def test_a_backend_is_asked_whether_it_can_plan_for_so_many(tmp_path: Path) -> None:
    request = a_request(
        run=RunConfig(name="n", storage_path=str(tmp_path)), scaling=ScalingConfig(num_workers=0)
    )
    with pytest.raises(ConfigError, match="Machines for 0"):
        clear(request)


def test_it_is_asked_for_the_machine_of_validations_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoCards(PaperCloud):
        def plan(self, request: GroupRequest) -> GroupPlan:
            if request.resources_per_worker.get("GPU"):
                raise ConfigError("There are no GPUs here.")
            return super().plan(request)

    monkeypatch.setattr(backend, "open_provisioner", lambda *_: NoCards())
    run = RunConfig(name="n", storage_path=str(tmp_path))

    def validating(**how: Any) -> FitRequest:
        config = ValidationConfig(dict, ray_remote_kwargs={"num_gpus": 1}, **how)
        return a_request(run=run, validation=config)

    with pytest.raises(ConfigError, match="no GPUs here"):
        clear(validating())
    assert clear(validating(own_machine=False)).name == "n"


# --- what the machines will run ------------------------------------------------------------------


def test_machines_with_another_python_are_refused_before_there_are_any(tmp_path: Path) -> None:
    run = RunConfig(name="n", storage_path=str(tmp_path))
    with pytest.raises(EnvironmentMismatchError, match=r"the machines run cpython 3\.9"):
        clear(a_request(run=run, provisioner='local?python="3.9"'))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("told", ["local", "local?python="], ids=["as here", "unknown"])
def test_machines_like_this_one_and_those_nobody_knows_are_let_pass(
    tmp_path: Path, told: str
) -> None:
    clear(a_request(run=RunConfig(name="n", storage_path=str(tmp_path)), provisioner=told))


@pytest.mark.parametrize(("pip", "fine"), [(["msgspec==99.0"], True), ([], False)])
def test_a_package_that_the_run_brings_may_differ_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pip: list[str], fine: bool
) -> None:
    cloud = PaperCloud(runs=Software(packages={"msgspec": "99.0"}))
    monkeypatch.setattr(backend, "open_provisioner", lambda _name, _options: cloud)
    run = RunConfig(name="n", storage_path=str(tmp_path), worker_runtime_env={"pip": pip})
    with nullcontext() if fine else pytest.raises(EnvironmentMismatchError, match=r"99\.0 there"):
        clear(a_request(run=run))
