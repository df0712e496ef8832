"""The classes that need Lightning: one per package, which pickle finds by name."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

import spotfit.lightning
from spotfit.lightning import lightning_classes
from spotfit.lightning.lightning_classes import CLASS_NAMES, HOMES, class_for
from tests.unit.lightning import fake_lightning


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    fake_lightning.install(monkeypatch, tmp_path, *HOMES)
    lightning_classes.class_for.cache_clear()
    yield
    lightning_classes.class_for.cache_clear()
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("lightning", "pytorch_lightning"):
            del sys.modules[name]


@pytest.mark.parametrize("package", HOMES)
@pytest.mark.parametrize("name", CLASS_NAMES)
def test_a_class_is_pickled_by_its_name(package: str, name: str) -> None:
    cls = class_for(package, name)
    assert cls.__name__ == name
    assert cls.__doc__
    assert pickle.loads(pickle.dumps(cls)) is cls
    assert len(cloudpickle.dumps(cls)) < 200, "by reference, not by value"


def test_the_classes_of_the_packages_have_their_base_classes() -> None:
    names = [class_for(package, "RayDDPStrategy").__mro__[2].__module__ for package in HOMES]
    assert names == ["lightning.pytorch.strategies", "pytorch_lightning.strategies"]


def test_a_name_of_the_package_is_the_class_for_the_imported_lightning() -> None:
    __import__("pytorch_lightning")
    assert spotfit.lightning.RayFSDPStrategy is class_for("pytorch_lightning", "RayFSDPStrategy")
    __import__("lightning.pytorch")
    assert spotfit.lightning.RayFSDPStrategy is class_for("lightning.pytorch", "RayFSDPStrategy")


def test_an_unknown_name_raises_attribute_error() -> None:
    from spotfit.lightning import of_lightning

    with pytest.raises(AttributeError, match="no_such_name"):
        of_lightning.no_such_name  # noqa: B018
