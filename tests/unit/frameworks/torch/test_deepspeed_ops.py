"""DeepSpeed is imported without its extension for collectives."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from spotfit.core.errors import MissingExtraError
from spotfit.frameworks.torch.deepspeed_ops import import_deepspeed


def test_the_extension_counts_as_incompatible(monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed, ops = ModuleType("deepspeed"), ModuleType("deepspeed.ops")
    compatible = {"deepspeed_shm_comm": True, "cpu_adam": True}
    parts: dict[str, Any] = vars(ops)
    parts["__compatible_ops__"] = compatible
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    monkeypatch.setitem(sys.modules, "deepspeed.ops", ops)
    assert import_deepspeed() is deepspeed
    assert compatible == {"deepspeed_shm_comm": False, "cpu_adam": True}


def test_a_missing_deepspeed_names_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingExtraError, match="no-build-isolation deepspeed"):
        import_deepspeed()
