"""What machines inherit, and when two environments are the same to them."""

from pathlib import Path

import pytest

from spotfit.core.ids import RunId, Token
from spotfit_localsim.live import pool
from spotfit_localsim.live.places import Root
from spotfit_localsim.live.processes import here


def test_machines_inherit_everything_but_one_run_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAVOUR", "salt")
    monkeypatch.setenv("SPOTFIT_RUN_SECRET", "key")
    monkeypatch.setenv("SPOTFIT_LOG_LEVEL", "DEBUG")
    inherited = pool.environment()
    assert inherited["FLAVOUR"] == "salt"
    assert inherited["SPOTFIT_LOG_LEVEL"] == "DEBUG"
    assert "SPOTFIT_RUN_SECRET" not in inherited


def test_a_machine_passes_on_the_driver_s_temporary_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", "/of/the/machine")
    monkeypatch.setenv(pool.TMPDIR, "/of/the/driver")
    assert pool.environment()["TMPDIR"] == "/of/the/driver"
    monkeypatch.setenv(pool.TMPDIR, "")
    assert "TMPDIR" not in pool.environment()


def test_what_means_nothing_makes_no_difference() -> None:
    assert pool.digest({"A": "1"}) == pool.digest({"A": "1", "PYTEST_CURRENT_TEST": "x", "_": "y"})
    assert pool.digest({"A": "1"}) != pool.digest({"A": "2"})


def test_a_driver_works_for_itself_and_a_machine_for_its_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(pool.OWNER, raising=False)
    assert pool.owner() == here()
    monkeypatch.setenv(pool.OWNER, "12-34")
    assert str(pool.owner()) == "12-34"


def test_there_is_nobody_to_ask_where_nothing_is(tmp_path: Path) -> None:
    root = Root(tmp_path / "root")
    node = root.group(RunId("run"), Token("a")).node(0)
    assert not pool.take(node, here(), "digest")
    pool.dismiss(root, here())
    assert not root.path.exists()
