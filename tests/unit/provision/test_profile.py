"""Where a backend's options come from: the call, the environment, spotfit.toml, the default."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError
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
def test_where_nobody_says_anything_the_defaults_hold() -> None:
    assert resolve_options("local", {}) == {}
    assert provisioner_from_profile() is None


def test_the_call_wins_over_the_environment_and_that_over_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "spotfit.toml").write_text(PROFILE)
    assert resolve_options("local", {}) == {"nodes": 2, "idle_s": 5.0}
    monkeypatch.setenv("SPOTFIT_LOCAL_NODES", "3")
    assert resolve_options("local", {})["nodes"] == 3
    assert resolve_options("local", {"nodes": 4}) == {"nodes": 4, "idle_s": 5.0}
    assert provisioner_from_profile() == "local"


def test_a_profile_says_only_what_differs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "spotfit.toml").write_text(PROFILE)
    monkeypatch.setenv("SPOTFIT_PROFILE", "big")
    assert resolve_options("local", {}) == {"nodes": 8, "idle_s": 5.0}
    monkeypatch.setenv("SPOTFIT_PROFILE", "bug")
    with pytest.raises(
        ConfigError, match=r"SPOTFIT_PROFILE=bug.* no such profile. Did you mean 'big'"
    ):
        resolve_options("local", {})


def test_what_terraform_writes_is_a_profile_and_the_toml_wins(folder: Path) -> None:
    (folder / "spotfit.json").write_text(
        '{"local": {"sensitive": false, "type": "map", "value": {"nodes": 5, "capacity": 9}}}'
    )
    assert resolve_options("local", {}) == {"nodes": 5, "capacity": 9}
    (folder / "spotfit.toml").write_text(PROFILE)
    assert resolve_options("local", {}) == {"nodes": 2, "capacity": 9, "idle_s": 5.0}


def test_a_named_file_is_the_only_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "spotfit.toml").write_text(PROFILE)
    (folder / "other.toml").write_text("[local]\nnodes = 7\n")
    monkeypatch.setenv("SPOTFIT_CONFIG", str(folder / "other.toml"))
    assert resolve_options("local", {}) == {"nodes": 7}
    monkeypatch.setenv("SPOTFIT_CONFIG", str(folder / "nowhere.toml"))
    with pytest.raises(ConfigError, match="the file does not exist"):
        resolve_options("local", {})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[local\n", "cannot be read"),
        ("local = 3\n", "not a table of options"),
        ("[local]\nnods = 3\n", "Did you mean 'nodes'"),
        ("[local]\nnodes = 'two'\n", "nodes='two'"),
    ],
)
def test_a_file_that_cannot_be_meant_is_told(folder: Path, text: str, told: str) -> None:
    (folder / "spotfit.toml").write_text(text)
    with pytest.raises(ConfigError, match=told):
        resolve_options("local", {})
