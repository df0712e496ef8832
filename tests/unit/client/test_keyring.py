"""Run keys are stored for their owner only."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from spotfit.client.keyring import RunKeyring
from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId
from spotfit.security.run_key import RunKey
from spotfit.testing.builders import RUN_ID

KEY = RunKey(b"k" * 32, RUN_ID)


def test_a_created_key_is_found_by_other_processes(tmp_path: Path) -> None:
    created = RunKeyring(tmp_path / "keys").create(RUN_ID)
    assert RunKeyring(tmp_path / "keys").find(RUN_ID) == created
    assert RunKeyring(tmp_path / "keys").find(RunId("f" * 32)) is None


def test_every_run_has_a_different_key(tmp_path: Path) -> None:
    keyring = RunKeyring(tmp_path)
    assert keyring.create(RUN_ID) != keyring.create(RunId("f" * 32))


def test_only_the_owner_can_read_the_key(tmp_path: Path) -> None:
    directory = tmp_path / "home" / "keys"
    RunKeyring(directory).create(RUN_ID)
    assert stat.S_IMODE((directory / RUN_ID).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_the_environment_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunKeyring(tmp_path).create(RUN_ID)
    monkeypatch.setenv("SPOTFIT_RUN_ID", RUN_ID)
    monkeypatch.setenv("SPOTFIT_RUN_SECRET", KEY.to_text())
    assert RunKeyring(tmp_path).find(RUN_ID) == KEY


def test_the_environment_applies_only_to_the_run_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id that is looked up was read from a bucket."""
    monkeypatch.setenv("SPOTFIT_RUN_SECRET", KEY.to_text())
    assert RunKeyring(tmp_path).find(RUN_ID) is None
    monkeypatch.setenv("SPOTFIT_RUN_ID", RUN_ID)
    assert RunKeyring(tmp_path).find(RunId("f" * 32)) is None


def test_keys_are_stored_in_spotfit_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path))
    RunKeyring().create(RUN_ID)
    assert (tmp_path / "keys" / RUN_ID).is_file()


@pytest.mark.parametrize("run_id", ["../../etc/passwd", "a/b", ""])
def test_a_run_id_with_a_path_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ConfigError, match="The run's id"):
        RunKeyring(tmp_path).find(RunId(run_id))
