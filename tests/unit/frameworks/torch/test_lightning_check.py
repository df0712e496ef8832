"""A Trainer of Lightning that would train one model per worker is rejected."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotfit.core.errors import UnpreparedTrainerError
from spotfit.frameworks.torch.lightning_check import (
    LIGHTNING_PACKAGES,
    check_trainers_at_fit,
    reject_unprepared_trainer,
)
from spotfit.policy.retry_budget import is_permanent_error
from tests.unit.lightning import fake_lightning


@pytest.fixture(autouse=True)
def _restore_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    fake_lightning.install(monkeypatch, tmp_path, *LIGHTNING_PACKAGES)
    yield
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("lightning", "pytorch_lightning"):
            del sys.modules[name]


def trainer_of(package: str, *, world_size: int) -> Any:
    return importlib.import_module(f"{package}.trainer").Trainer(world_size, SimpleNamespace())


@pytest.mark.parametrize("package", LIGHTNING_PACKAGES)
@pytest.mark.parametrize("imported_before", [True, False])
def test_fit_of_an_unprepared_trainer_raises_whenever_it_was_imported(
    package: str, *, imported_before: bool
) -> None:
    if imported_before:
        importlib.import_module(package + ".trainer")
    check_trainers_at_fit(4)
    with pytest.raises(UnpreparedTrainerError, match="RayDDPStrategy") as raised:
        trainer_of(package, world_size=1).fit("model")
    assert isinstance(raised.value, RuntimeError)
    assert is_permanent_error(raised.value)
    assert trainer_of(package, world_size=4).fit("model") == "trained model"


def test_a_patched_module_has_its_source() -> None:
    """Tracebacks and debuggers read it from the loader."""
    check_trainers_at_fit(4)
    module = importlib.import_module("pytorch_lightning.trainer.trainer")
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    source: Any = module.__spec__.loader
    assert "class Trainer" in source.get_source(module.__name__)


@pytest.mark.parametrize(
    ("launcher", "is_rejected"),
    [
        (None, False),
        (SimpleNamespace(), True),
        (
            SimpleNamespace(
                cluster_environment=SimpleNamespace(creates_processes_externally=False)
            ),
            True,
        ),
        (
            SimpleNamespace(cluster_environment=SimpleNamespace(creates_processes_externally=True)),
            False,
        ),
    ],
)
def test_a_trainer_that_starts_processes_is_rejected(launcher: Any, *, is_rejected: bool) -> None:
    trainer = SimpleNamespace(strategy=SimpleNamespace(launcher=launcher), world_size=2)
    if not is_rejected:
        reject_unprepared_trainer(trainer, 2)
        return
    with pytest.raises(UnpreparedTrainerError, match="start processes of its own"):
        reject_unprepared_trainer(trainer, 2)
