"""Plugin for a Python without torch, `pytest -p tests.without_torch`: skips what imports it."""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

import pytest


class _TorchFinder(MetaPathFinder):
    def find_spec(self, name: str, _path: Any, _target: Any = None) -> None:
        if name == "torch":
            pytest.skip("torch is not installed", allow_module_level=True)


def pytest_configure() -> None:
    sys.meta_path.append(_TorchFinder())  # asked last: only if no other finder has found torch
