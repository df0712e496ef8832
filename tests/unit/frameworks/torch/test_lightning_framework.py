"""LightningFramework preloads the installed package of Lightning."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from spotfit.frameworks.registry import open_framework
from spotfit.frameworks.torch.process_group import TorchFramework
from tests.unit.lightning import fake_lightning


@pytest.mark.parametrize(
    ("installed", "preloaded"),
    [
        ((), None),
        (("pytorch_lightning",), "pytorch_lightning"),
        (("lightning.pytorch", "pytorch_lightning"), "lightning.pytorch"),
    ],
)
def test_one_installed_package_is_preloaded_after_torch(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    installed: tuple[str, ...],
    preloaded: str | None,
) -> None:
    fake_lightning.install(monkeypatch, tmp_path, *installed)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    modules = open_framework("lightning").preload_modules
    torch_modules = TorchFramework().preload_modules
    assert modules[: len(torch_modules)] == torch_modules
    assert modules[len(torch_modules) :][:1] == ((preloaded,) if preloaded else ())
