"""The keyring: a key is found again, and nobody else may read it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from spotfit.client.keyring import Keyring
from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId
from spotfit.ship.sign import RunKey
from spotfit.testing.builders import RUN

KEY = RunKey(b"k" * 32, RUN)


def test_what_was_made_is_found_again_from_any_process(tmp_path: Path) -> None:
    made = Keyring(tmp_path / "keys").make(RUN)
    assert Keyring(tmp_path / "keys").find(RUN) == made
    assert Keyring(tmp_path / "keys").find(RunId("f" * 32)) is None


def test_every_run_has_a_key_of_its_own(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path)
    assert keyring.make(RUN) != keyring.make(RunId("f" * 32))


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    directory = tmp_path / "home" / "keys"
    Keyring(directory).make(RUN)
    assert stat.S_IMODE((directory / RUN).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_the_environment_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Keyring(tmp_path).make(RUN)
    monkeypatch.setenv("SPOTFIT_RUN_SECRET", KEY.to_text())
    assert Keyring(tmp_path).find(RUN) == KEY


def test_keys_lie_in_the_users_home_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path))
    Keyring().make(RUN)
    assert (tmp_path / "keys" / RUN).is_file()


@pytest.mark.parametrize("run_id", ["../../etc/passwd", "a/b", ""])
def test_a_foreign_journal_cannot_lead_it_elsewhere(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ConfigError, match="The run's id"):
        Keyring(tmp_path).find(RunId(run_id))
