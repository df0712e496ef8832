"""`read_delta`, `read_iceberg` and `read_lance` without their packages."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

import spotfit.data
from spotfit.core.errors import ConfigError, MissingExtraError

ARGUMENTS: dict[str, dict[str, Any]] = {
    "read_delta": {"path": "table"},
    "read_iceberg": {"table_identifier": "space.table"},
    "read_lance": {"uri": "table"},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_missing_package_is_reported_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def import_module(module: str) -> ModuleType:
        if module.partition(".")[0] in ("deltalake", "pyiceberg", "lance"):
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return real(module)

    monkeypatch.setattr(importlib, "import_module", import_module)
    dataset = getattr(spotfit.data, name)(**ARGUMENTS[name], override_num_blocks=3)
    extra = name.removeprefix("read_")
    with pytest.raises(MissingExtraError, match=rf"spotfit\[{extra}\]"):
        _ = dataset.manifest


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *(("read_delta", "catalog"), ("read_delta", "filesystem")),
        *(("read_iceberg", "row_filter"), ("read_iceberg", "scan_kwargs")),
        *(("read_iceberg", "catalog"), ("read_lance", "filter"), ("read_lance", "scanner_options")),
    ],
)
def test_unsupported_arguments_are_refused(name: str, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}\({option}=…\) is not supported"):
        getattr(spotfit.data, name)(**ARGUMENTS[name], **{option: "x"})
