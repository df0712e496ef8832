"""The package of Lightning in use: the one that the script has imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.core.errors import MissingExtraError
from spotfit.lightning.lightning_package import imported_package, load, package_of
from tests.unit.lightning import fake_lightning

BOTH = ("lightning.pytorch", "pytorch_lightning")


@pytest.fixture(autouse=True)
def _forget_imports() -> Iterator[None]:
    yield
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("lightning", "pytorch_lightning"):
            del sys.modules[name]


@pytest.mark.parametrize("package", BOTH)
def test_the_only_installed_package_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str
) -> None:
    fake_lightning.install(monkeypatch, tmp_path, package)
    assert imported_package() == package
    assert package in sys.modules


@pytest.mark.parametrize("first", [0, 1])
def test_the_package_that_was_imported_last_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: int
) -> None:
    """A forked worker may have another one from the fork server."""
    fake_lightning.install(monkeypatch, tmp_path, *BOTH)
    for name in (BOTH[first], BOTH[1 - first]):
        importlib.import_module(name)
        assert imported_package() == name


def test_without_lightning_the_error_has_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_lightning.install(monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    with pytest.raises(MissingExtraError, match=r"pip install 'spotfit\[lightning\]'"):
        imported_package()


def test_a_missing_dependency_of_lightning_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_lightning.install(monkeypatch, tmp_path, "pytorch_lightning")
    (tmp_path / "pytorch_lightning/__init__.py").write_text("import no_such_dependency\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        imported_package()


@pytest.mark.parametrize("package", BOTH)
def test_the_package_of_a_trainer_is_that_of_its_class(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str
) -> None:
    fake_lightning.install(monkeypatch, tmp_path, *BOTH)
    trainer_class = load(package, "trainer").Trainer
    subclass = type("UserTrainer", (trainer_class,), {"__module__": "user"})
    assert package_of(trainer_class()) == package_of(subclass()) == package
