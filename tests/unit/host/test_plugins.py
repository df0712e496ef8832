"""Plugins are loaded by name; failures are reported with a reason."""

import sys
from importlib.metadata import EntryPoint

import pytest

from spotfit.core.errors import ConfigError, MissingExtraError
from spotfit.host import plugins

GROUP = "spotfit.fruits"


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, GROUP)


def test_the_object_of_an_entry_point_is_returned() -> None:
    assert (
        plugins.load(GROUP, "path", entry_points=[point("path", "pathlib:Path")]).__name__ == "Path"
    )


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no fruit 'aple'. Did you mean 'apple'"):
        plugins.load(
            GROUP, "aple", entry_points=[point("apple", "pathlib:Path"), point("pear", "os:x")]
        )


def test_two_packages_with_one_name_are_refused() -> None:
    both = [point("apple", "pathlib:Path"), point("apple", "pathlib:PurePath")]
    with pytest.raises(ConfigError, match="pathlib:PurePath"):
        plugins.load(GROUP, "apple", entry_points=both)


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(MissingExtraError, match="no_such_package") as caught:
        plugins.load(GROUP, "apple", entry_points=[point("apple", "no_such_package:Apple")])
    assert "spotfit[apple]" in caught.value.do


def test_a_plugin_that_cannot_be_imported_is_reported() -> None:
    with pytest.raises(ConfigError, match="cannot be loaded: AttributeError"):
        plugins.load(GROUP, "apple", entry_points=[point("apple", "pathlib:Apple")])


def test_names_imports_nothing() -> None:
    assert isinstance(plugins.names(GROUP), tuple)


def test_a_plugin_for_unix_is_refused_with_alternatives_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    monkeypatch.delitem(sys.modules, "spotfit_provisioners.local.state_dir", raising=False)
    monkeypatch.delitem(sys.modules, "spotfit_provisioners.local.provisioner", raising=False)
    with pytest.raises(ConfigError, match="'local' does not run on this system") as refused:
        plugins.load("spotfit.provisioners", "local")
    assert "WSL 2" in refused.value.do
    assert "num_workers=0" in refused.value.do
