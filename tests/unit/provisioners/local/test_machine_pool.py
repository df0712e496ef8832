"""Inherited environment variables, and equality of environments."""

from pathlib import Path

import pytest

from spotfit.core.ids import RunId, Token
from spotfit_provisioners.local import machine_pool
from spotfit_provisioners.local.processes import current_process
from spotfit_provisioners.local.state_dir import LocalCloudDir


def test_machines_inherit_the_environment_except_run_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLAVOUR", "salt")
    monkeypatch.setenv("SPOTFIT_RUN_SECRET", "key")
    monkeypatch.setenv("SPOTFIT_LOG_LEVEL", "DEBUG")
    inherited = machine_pool.inherited_environment()
    assert inherited["FLAVOUR"] == "salt"
    assert inherited["SPOTFIT_LOG_LEVEL"] == "DEBUG"
    assert "SPOTFIT_RUN_SECRET" not in inherited


def test_machine_passes_on_the_temporary_directory_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", "/of/the/machine")
    monkeypatch.setenv(machine_pool.TMPDIR_ENV, "/of/the/driver")
    assert machine_pool.inherited_environment()["TMPDIR"] == "/of/the/driver"
    monkeypatch.setenv(machine_pool.TMPDIR_ENV, "")
    assert "TMPDIR" not in machine_pool.inherited_environment()


def test_irrelevant_variables_do_not_change_the_environment_hash() -> None:
    assert machine_pool.environment_digest({"A": "1"}) == machine_pool.environment_digest(
        {"A": "1", "PYTEST_CURRENT_TEST": "x", "_": "y"}
    )
    assert machine_pool.environment_digest({"A": "1"}) != machine_pool.environment_digest(
        {"A": "2"}
    )


def test_owner_is_the_driver_also_in_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(machine_pool.OWNER_ENV, raising=False)
    assert machine_pool.owner_process() == current_process()
    monkeypatch.setenv(machine_pool.OWNER_ENV, "12-34")
    assert str(machine_pool.owner_process()) == "12-34"


def test_no_machine_is_waiting_in_an_empty_root(tmp_path: Path) -> None:
    root = LocalCloudDir(tmp_path / "root")
    node = root.group(RunId("run"), Token("a")).node(0)
    assert not machine_pool.assign_waiting_machine(node, current_process(), "digest")
    machine_pool.dismiss_machines(root, current_process())
    assert not root.path.exists()
