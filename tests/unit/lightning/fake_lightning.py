"""A small package with the module names of Lightning, for tests where Lightning is not installed.

Only what concerns the choice of the package and the check of a Trainer. What depends on Lightning's
loops is tested with the real packages, in tests/frameworks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TRAINER = """
class Trainer:
    def __init__(self, world_size=1, strategy=None):
        self.world_size, self.strategy = world_size, strategy

    def fit(self, model):
        return f"trained {model}"
"""
SOURCES = {
    "__init__.py": "",
    "callbacks.py": "class Callback: pass\n",
    "plugins/__init__.py": "",
    "plugins/environments.py": "class LightningEnvironment: pass\n",
    "strategies.py": """
class DDPStrategy:
    def __init__(self, *args, **kwargs):
        self.arguments = args, kwargs
        self._configure_launcher()

    def _configure_launcher(self):
        raise AssertionError("it would start processes")

class FSDPStrategy(DDPStrategy):
    def lightning_module_state_dict(self):
        return {"weight": 1}

class DeepSpeedStrategy(DDPStrategy): pass
""",
    "trainer/__init__.py": "from .trainer import Trainer\n",
    "trainer/trainer.py": TRAINER,
}


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, *packages: str) -> None:
    """Make these packages importable and forget imported ones until the end of the test."""
    for package in packages:
        root = folder.joinpath(*package.split("."))
        for name, text in SOURCES.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("lightning", "pytorch_lightning"):
            monkeypatch.delitem(sys.modules, name)
