"""Options of a backend come from the call, the environment, spotfit.toml or the defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError
from spotfit.host import machine
from spotfit.provision.profile import provisioner_from_profile, resolve_options

PROFILE = """
provisioner = "local"
[local]
nodes = 2
idle_s = 5
[profiles.big.local]
nodes = 8
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "project" / "scripts").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project" / "scripts")
    return tmp_path / "project"


@pytest.mark.usefixtures("folder")
def test_defaults_apply_without_settings() -> None:
    assert resolve_options("local", {}) == {}
    assert provisioner_from_profile() is None


def test_call_overrides_the_environment_which_overrides_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "spotfit.toml").write_text(PROFILE)
    assert resolve_options("local", {}) == {"nodes": 2, "idle_s": 5.0}
    monkeypatch.setenv("SPOTFIT_LOCAL_NODES", "3")
    assert resolve_options("local", {})["nodes"] == 3
    assert resolve_options("local", {"nodes": 4}) == {"nodes": 4, "idle_s": 5.0}
    assert provisioner_from_profile() == "local"


def test_profile_overrides_single_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "spotfit.toml").write_text(PROFILE)
    monkeypatch.setenv("SPOTFIT_PROFILE", "big")
    assert resolve_options("local", {}) == {"nodes": 8, "idle_s": 5.0}
    monkeypatch.setenv("SPOTFIT_PROFILE", "bug")
    with pytest.raises(
        ConfigError, match=r"SPOTFIT_PROFILE=bug.* no such profile. Did you mean 'big'"
    ):
        resolve_options("local", {})


def test_toml_overrides_the_output_of_terraform(folder: Path) -> None:
    (folder / "spotfit.json").write_text(
        '{"local": {"sensitive": false, "type": "map", "value": {"nodes": 5, "capacity": 9}}}'
    )
    assert resolve_options("local", {}) == {"nodes": 5, "capacity": 9}
    (folder / "spotfit.toml").write_text(PROFILE)
    assert resolve_options("local", {}) == {"nodes": 2, "capacity": 9, "idle_s": 5.0}


def test_configured_file_replaces_the_default_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "spotfit.toml").write_text(PROFILE)
    (folder / "other.toml").write_text("[local]\nnodes = 7\n")
    monkeypatch.setenv("SPOTFIT_CONFIG", str(folder / "other.toml"))
    assert resolve_options("local", {}) == {"nodes": 7}
    monkeypatch.setenv("SPOTFIT_CONFIG", str(folder / "missing.toml"))
    with pytest.raises(ConfigError, match="the file does not exist"):
        resolve_options("local", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[local\n", "cannot be read"),
        ("local = 3\n", "not a table of options"),
        ("[local]\nnods = 3\n", "Did you mean 'nodes'"),
        ("[local]\nnodes = 'two'\n", "nodes='two'"),
    ],
)
def test_invalid_file_is_reported(folder: Path, text: str, message: str) -> None:
    (folder / "spotfit.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        resolve_options("local", {})


@pytest.mark.usefixtures("folder")
def test_user_is_the_login_name_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recorded with the options, so that agents on machines use the same."""
    monkeypatch.setattr(machine, "login_name", lambda: "jane")
    assert resolve_options("kubernetes", {})["user"] == "jane"
    assert resolve_options("kubernetes", {"user": "team"})["user"] == "team"
    monkeypatch.setattr(machine, "login_name", lambda: "")
    assert "user" not in resolve_options("kubernetes", {})
