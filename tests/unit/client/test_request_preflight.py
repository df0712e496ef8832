"""Preflight checks report all errors before machines are requested."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from spotfit.client import request
from spotfit.client.request import FitRequest, run_preflight
from spotfit.client.run_config import RunConfig
from spotfit.core.errors import (
    AtomicCreateUnsupportedError,
    ConfigError,
    ConfigErrors,
    EnvironmentMismatchError,
    MissingExtraError,
    SpotfitError,
    StoreError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.frameworks.backend_config import BackendConfig
from spotfit.host import system
from spotfit.model.config import ScalingConfig
from spotfit.model.group import GroupPlan, GroupRequest, Software
from spotfit.model.user_callback import UserCallback
from spotfit.model.validation_config import ValidationConfig
from spotfit.store.api import Store
from spotfit.store.local import LocalStore
from spotfit.testing.builders import ManualClock
from tests.unit.client.test_request import a_request
from tests.unit.control.fake_provisioner import FakeProvisioner


def two_parameters(config: Any, more: Any) -> None:
    """Not a valid training function."""


def test_a_valid_request_opens_the_directory_of_the_run(tmp_path: Path) -> None:
    checked = run_preflight(a_request(run=RunConfig(name="digits", storage_path=str(tmp_path))))
    assert checked.name == "digits"
    assert checked.store.url.endswith("/digits")
    assert checked.provisioner.name == "local"
    assert list(checked.store.list()) == [], "probes are deleted"


def test_a_generated_name_is_kept(tmp_path: Path) -> None:
    request = a_request(run=RunConfig(storage_path=str(tmp_path)))
    one, again = run_preflight(request), run_preflight(request)
    assert one.name == again.name == request.run.name, "a second fit continues the run"


def test_callbacks_of_the_environment_precede_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = UserCallback()
    run = RunConfig(name="digits", storage_path=str(tmp_path), callbacks=[callback])
    monkeypatch.setenv("SPOTFIT_CALLBACKS", "spotfit.model.user_callback.UserCallback")
    checked = run_preflight(a_request(run=run))
    assert checked.run.callbacks is not None
    assert len(checked.run.callbacks) == 2
    assert checked.run.callbacks[-1] is callback
    assert run.callbacks == [callback], "the user's object is not modified"


def test_invalid_environment_variables_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_COLLECTIVE_TIMEOUT_S", "soon")
    monkeypatch.setenv("SPOTFIT_PORT", "99999")
    with pytest.raises(ConfigErrors) as refused:
        run_preflight(a_request(two_parameters, run=RunConfig("digits", str(tmp_path))))
    assert len(refused.value.errors) == 3


def test_settings_without_effect_are_logged_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "0")
    scaling = ScalingConfig(placement_strategy="SPREAD", label_selector={"zone": "a"})
    run_preflight(a_request(run=RunConfig("digits", str(tmp_path)), scaling=scaling))
    err = capsys.readouterr().err
    for name in ("RAY_TRAIN_V2_ENABLED", "placement_strategy", "label_selector"):
        assert f"config.ignored option={name} reason=" in err


class InvalidConfig(BackendConfig):
    """Its backend is not a class."""

    @property
    def backend_cls(self) -> Any:
        return print


def test_an_invalid_backend_is_reported(tmp_path: Path) -> None:
    run = RunConfig(name="digits", storage_path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"InvalidConfig\.backend_cls"):
        run_preflight(a_request(run=run, backend_config=InvalidConfig()))


def test_all_errors_are_reported_together() -> None:
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
        run_preflight(request)
    message = str(refused.value)
    assert message.startswith("Found 5 errors")
    for word in ("two_parameters", "../up", "nowhere", "condaa", "Did you mean 'local'?"):
        assert word in message
    assert all(isinstance(error, ConfigError) for error in refused.value.errors)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fn": two_parameters}, "0 or 1 required arguments"),
        ({"provisioner": "local?nodez=2"}, "nodez"),
        ({"provisioner": "local?nodes=0"}, "nodes"),
        ({"name": "a/b"}, "RunConfig.name="),
        ({"name": "a..b"}, "RunConfig.name="),
    ],
)
def test_a_single_error_is_raised_unwrapped(tmp_path: Path, given: Any, message: str) -> None:
    run = RunConfig(name=given.pop("name", "digits"), storage_path=str(tmp_path))
    with pytest.raises(SpotfitError, match=message) as refused:
        run_preflight(a_request(run=run, **given))
    assert not isinstance(refused.value, ConfigErrors)


def test_unwritable_storage_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    request = a_request(run=RunConfig(name="n", storage_path=str(tmp_path / "file")))
    with pytest.raises(SpotfitError) as refused:
        run_preflight(request)
    assert "file" in str(refused.value)


def test_a_store_without_atomic_create_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(LocalStore, "create", LocalStore.put)
    with pytest.raises(AtomicCreateUnsupportedError):
        run_preflight(a_request(run=RunConfig(name="n", storage_path=str(tmp_path))))


def test_memory_storage_is_refused() -> None:
    with pytest.raises(ConfigError, match="exists only in the process that called") as refused:
        run_preflight(a_request(run=RunConfig(name="n", storage_path="memory://here")))
    assert "num_workers=0" in refused.value.do


@pytest.mark.parametrize("scheme", ["elsewhere", "file"])
def test_a_file_system_that_machines_cannot_reach_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str
) -> None:
    memory = pytest.importorskip("fsspec.implementations.memory")
    private = type("Private", (memory.MemoryFileSystem,), {"protocol": scheme})()
    monkeypatch.setattr(request, "probe_create", lambda _store: None)
    run = RunConfig(name="n", storage_path=str(tmp_path), storage_filesystem=private)
    with pytest.raises(ConfigError, match="nodes will open"):
        run_preflight(a_request(run=run))


def a_probe_that_fails(*errors: StoreError) -> tuple[Callable[[Store], None], list[StoreError]]:
    """Return a probe that raises these errors in turn, and the list of remaining errors."""
    remaining = list(errors)

    def probe(_store: Store) -> None:
        if remaining:
            raise remaining.pop(0)

    return probe, remaining


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock()
    monkeypatch.setattr(system, "SystemClock", lambda: clock)
    return clock


def test_temporary_store_failures_are_retried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: ManualClock
) -> None:
    probe, remaining = a_probe_that_fails(*[TransientStoreError("no answer")] * 4)
    monkeypatch.setattr(request, "probe_create", probe)
    started_at = clock.now()
    run_preflight(a_request(run=RunConfig(name="n", storage_path=str(tmp_path))))
    assert remaining == []
    assert clock.now() - started_at == pytest.approx(3.7)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("errors", "left"),
    [([TransientStoreError("no answer")] * 9, 4), ([StorePermissionError("not yours")] * 9, 8)],
    ids=["unavailable", "permission"],
)
def test_permanent_store_failures_are_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, errors: list[StoreError], left: int
) -> None:
    probe, remaining = a_probe_that_fails(*errors)
    monkeypatch.setattr(request, "probe_create", probe)
    with pytest.raises(type(errors[0])):
        run_preflight(a_request(run=RunConfig(name="n", storage_path=str(tmp_path))))
    assert len(remaining) == left


def test_the_provisioner_plans_the_number_of_workers(tmp_path: Path) -> None:
    request = a_request(
        run=RunConfig(name="n", storage_path=str(tmp_path)), scaling=ScalingConfig(num_workers=0)
    )
    with pytest.raises(ConfigError, match="at least one worker: num_workers=0"):
        run_preflight(request)


def test_the_provisioner_plans_the_validation_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithoutGpus(FakeProvisioner):
        def plan(self, request: GroupRequest) -> GroupPlan:
            if request.resources_per_worker.get("GPU"):
                raise ConfigError("There are no GPUs here.")
            return super().plan(request)

    monkeypatch.setattr(request, "open_provisioner", lambda *_: WithoutGpus())
    run = RunConfig(name="n", storage_path=str(tmp_path))

    def validating(**options: Any) -> FitRequest:
        config = ValidationConfig(dict, ray_remote_kwargs={"num_gpus": 1}, **options)
        return a_request(run=run, validation=config)

    with pytest.raises(ConfigError, match="no GPUs here"):
        run_preflight(validating())
    assert run_preflight(validating(own_machine=False)).name == "n"


# --- software of the nodes -----------------------------------------------------------------------


def test_nodes_with_another_python_are_refused(tmp_path: Path) -> None:
    run = RunConfig(name="n", storage_path=str(tmp_path))
    with pytest.raises(EnvironmentMismatchError, match=r"the machines run cpython 3\.9"):
        run_preflight(a_request(run=run, provisioner='local?python="3.9"'))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("provisioner", ["local", "local?python="], ids=["as here", "unknown"])
def test_nodes_with_equal_or_unknown_software_are_accepted(
    tmp_path: Path, provisioner: str
) -> None:
    run_preflight(
        a_request(run=RunConfig(name="n", storage_path=str(tmp_path)), provisioner=provisioner)
    )


@pytest.mark.parametrize(("pip", "fine"), [(["msgspec==99.0"], True), ([], False)])
def test_a_package_in_the_runtime_env_may_differ_on_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pip: list[str], fine: bool
) -> None:
    cloud = FakeProvisioner(software=Software(packages={"msgspec": "99.0"}))
    monkeypatch.setattr(request, "open_provisioner", lambda _name, _options: cloud)
    run = RunConfig(name="n", storage_path=str(tmp_path), worker_runtime_env={"pip": pip})
    difference = pytest.raises(EnvironmentMismatchError, match=r"99\.0 on the machines")
    with nullcontext() if fine else difference:
        run_preflight(a_request(run=run))


class NeedsModule(BackendConfig):
    """Its workers need a module that no package has."""

    def required_modules(self, env_vars: Mapping[str, str]) -> tuple[str, ...]:
        return (env_vars.get("MODULE", "no_such_module"),)


@pytest.mark.parametrize(
    ("runtime_env", "fine"),
    [({}, False), ({"pip": ["no-such-module"]}, True), ({"env_vars": {"MODULE": "msgspec"}}, True)],
    ids=["missing", "will be installed", "not needed"],
)
def test_a_module_that_this_environment_lacks_is_reported_for_local_workers(
    tmp_path: Path, runtime_env: dict[str, Any], fine: bool
) -> None:
    run = RunConfig(name="n", storage_path=str(tmp_path), worker_runtime_env=runtime_env)
    difference = pytest.raises(MissingExtraError, match="needs the package no-such-module")
    with nullcontext() if fine else difference:
        run_preflight(a_request(run=run, backend_config=NeedsModule(), provisioner="local"))


def test_a_module_that_this_environment_lacks_may_be_on_other_machines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cloud = FakeProvisioner(software=Software(packages={}))
    monkeypatch.setattr(request, "open_provisioner", lambda _name, _options: cloud)
    run = RunConfig(name="n", storage_path=str(tmp_path))
    run_preflight(a_request(run=run, backend_config=NeedsModule()))


# --- client library and shared directories -------------------------------------------------------


class CloudWithLibrary(FakeProvisioner):
    """Its client library raises `error` when it is loaded."""

    def __init__(self, error: Exception | None = None, **traits: Any) -> None:
        super().__init__(**traits)
        self.error = error

    def open_client(self) -> None:
        if self.error is not None:
            raise self.error


def use_cloud(monkeypatch: pytest.MonkeyPatch, cloud: FakeProvisioner) -> None:
    monkeypatch.setattr(request, "open_provisioner", lambda *_: cloud)


def test_a_missing_client_library_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = MissingExtraError("boto3 is not installed", do="pip install 'spotfit[aws]'")
    use_cloud(monkeypatch, CloudWithLibrary(error))
    with pytest.raises(MissingExtraError, match=r"spotfit\[aws\]"):
        run_preflight(a_request(run=RunConfig("digits", str(tmp_path / "runs"))))
    assert not (tmp_path / "runs").exists()


def test_a_temporary_failure_of_the_client_library_is_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_cloud(monkeypatch, CloudWithLibrary(TimeoutError("no answer of the metadata server")))
    run_preflight(a_request(run=RunConfig("digits", str(tmp_path))))
    assert "provisioner.not_opened" in capsys.readouterr().err


def test_a_directory_is_rejected_if_machines_can_mount_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cloud(monkeypatch, CloudWithLibrary(shared_directories="never"))
    for path in (str(tmp_path), f"file://{tmp_path}"):
        with pytest.raises(ConfigError, match="its machines cannot read") as refused:
            run_preflight(a_request(run=RunConfig("digits", path)))
        assert "s3://bucket/runs" in refused.value.do
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shared", ["always", "possibly"])
def test_the_default_storage_path_is_for_machines_that_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    use_cloud(monkeypatch, CloudWithLibrary(shared_directories=shared))
    if shared == "always":
        run_preflight(a_request(run=RunConfig("digits")))
    else:
        with pytest.raises(ConfigError, match="may not share") as refused:
            run_preflight(a_request(run=RunConfig("digits")))
        assert "all machines mount" in refused.value.do
    run_preflight(a_request(run=RunConfig("digits", str(tmp_path / "shared"))))


def test_a_directory_of_windows_is_refused_for_machines_with_linux(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    use_cloud(monkeypatch, CloudWithLibrary(shared_directories="possibly"))
    with pytest.raises(ConfigError, match="a path of Windows") as refused:
        run_preflight(a_request(run=RunConfig("digits", str(tmp_path))))
    assert "mount" not in refused.value.do
