"""Extracted graphs are compiled once per node, into the configured folder."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from spotfit.core.errors import MissingExtraError
from spotfit.frameworks.torch.xla_backend import cache_folder, compile_extracted_graphs


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        ("", None),
        ("-O1", None),
        ("--cache_dir=/cache -O1", "/cache"),
        ("-O1 --cache_dir s3://bucket/neuron", "s3://bucket/neuron"),
    ],
)
def test_the_cache_folder_is_read_from_the_flags(flags: str, folder: str | None) -> None:
    assert cache_folder(flags) == folder


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A fake compiler that records its arguments; the real one needs Neuron's software."""
    done: list[Any] = []

    def parallel_compile(folder: str, place: str) -> None:
        done.append((Path(folder).is_dir(), folder[-1], place))

    parts: dict[str, Any] = {
        "libneuronxla": {},
        "libneuronxla.neuron_cc_cache": {
            "CacheUrl": SimpleNamespace(get_cache_url=lambda folder: f"at {folder}")
        },
        "libneuronxla.neuron_parallel_compile": {"parallel_compile": parallel_compile},
    }
    for name, offers in parts.items():
        module = ModuleType(name)
        vars(module).update(offers)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("NEURON_CC_FLAGS", "--cache_dir=/cache")
    return done


@pytest.mark.parametrize(("local_rank", "times"), [("0", 1), ("1", 0)])
def test_the_first_worker_of_a_node_compiles_after_the_function(
    local_rank: str, times: int, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with compile_extracted_graphs():
        assert compiled == []
    assert compiled == [(True, "/", "at /cache")] * times


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(MissingExtraError, match="libneuronxla"), compile_extracted_graphs():
        pass
