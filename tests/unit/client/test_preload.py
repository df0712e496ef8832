"""What a training function reaches, imports and must not import early."""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from spotfit.client.preload import find_preload_modules, find_script_modules

BERT = "transformers.models.bert.modeling_bert"
# A module of the user's project that calls libraries which need not be installed.
PROJECT_MODULE = """
from libraries import Bert, numpy, os, torch, transformers

def uses_a_module(): return transformers.Trainer()
def uses_a_class(): return {"model": Bert}
def uses_a_default(model=Bert): return model
def imports(): from lightning.pytorch import Trainer; import sklearn.ensemble as e; return Trainer
def imports_in_a_function():
    def build(): import xgboost
    return build
def imports_after_a_change():
    os.environ["HF_HOME"] = "/cache"
    import lightgbm
    return transformers.Trainer
def imports_after_a_read():
    if os.environ["RANK"] == "0" and "A" in os.environ and os.environ.get("B"): import lightgbm
def imports_others(): import wandb, json, wave
def calls(): return uses_a_class()
def uses_an_integration(): from spotfit.lightning import RayDDPStrategy
def uses_arrays(): return torch.ones(3), numpy.zeros(3)

class Task:
    model = Bert
    def run(self): import pandas
def uses_an_object(): return task
task = Task()
"""


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The imported module of a project in the working directory."""
    (tmp_path / "the_project.py").write_text(PROJECT_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    libraries: Any = ModuleType("libraries")
    libraries.Bert = type("Bert", (), {"__module__": BERT})
    libraries.os = os
    for name in ("numpy", "torch", "transformers"):
        setattr(libraries, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "libraries", libraries)
    yield importlib.import_module("the_project")
    del sys.modules["the_project"]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("uses_a_module", {"transformers.Trainer"}),
        ("uses_a_class", {BERT}),
        ("uses_a_default", {BERT}),
        ("calls", {BERT}),
        ("imports", {"lightning.pytorch", "sklearn.ensemble"}),
        ("imports_in_a_function", {"xgboost"}),
        ("imports_after_a_read", {"lightgbm"}),
        ("imports_others", set()),
        ("uses_an_integration", {"spotfit.lightning", "spotfit.lightning.RayDDPStrategy"}),
        ("uses_arrays", {"numpy", "torch", "torch._dynamo"}),
        ("uses_an_object", {BERT, "pandas"}),
    ],
)
def test_what_a_function_uses_is_found(
    project: ModuleType, function: str, expected: set[str]
) -> None:
    imported_by_module = {"numpy", "torch", "torch._dynamo", "transformers", BERT}
    found = set(find_preload_modules(getattr(project, function)))
    assert expected <= found
    assert found <= expected | imported_by_module


def test_imports_after_a_change_of_the_environment_are_not_found(
    project: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    found = find_preload_modules(project.imports_after_a_change)
    assert "lightgbm" not in found
    assert "transformers.Trainer" in found, "unpickling the function imports transformers"
    assert "fit.not_preloaded: the training function changes environment" in capsys.readouterr().err


def test_the_framework_is_imported_anyway(project: ModuleType) -> None:
    found = find_preload_modules(project.uses_arrays, framework="torch")
    assert "numpy" in found
    assert not {"torch", "torch._dynamo"} & set(found)


def wrap_in_partial(function: Callable[[], Any]) -> Any:
    return functools.partial(lambda fn: fn(), function)


def wrap_in_cache(function: Callable[[], Any]) -> Any:
    return functools.cache(function)


def wrap_in_config(function: Callable[[], Any]) -> Any:
    return {"builders": [function]}


def wrap_in_closure(function: Callable[[], Any]) -> Any:
    return lambda: function()


@pytest.mark.parametrize("wrap", [wrap_in_partial, wrap_in_cache, wrap_in_config, wrap_in_closure])
def test_wrapped_functions_are_examined(project: ModuleType, wrap: Callable[[Any], Any]) -> None:
    assert "sklearn.ensemble" in find_preload_modules(wrap(project.imports), project.calls)


def test_the_models_that_the_caller_has_loaded_are_found(
    project: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    found = find_preload_modules(project.uses_a_module)
    assert {"transformers.trainer", "transformers.models.gpt2.modeling_gpt2"} < set(found)


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        (
            "import torch\nfrom transformers import Trainer\ndef f():\n    import xgboost",
            {"torch", "torch._dynamo", "transformers", "transformers.Trainer", "xgboost"},
        ),
        ("import os\nos.environ['HF_HOME'] = '/cache'\nimport transformers", set()),
        ("from . import sibling\nimport json, wandb", set()),
        ("this is not Python", set()),
    ],
)
def test_the_imports_of_a_script_are_found(tmp_path: Path, text: str, modules: set[str]) -> None:
    (tmp_path / "train.py").write_text(text)
    assert set(find_script_modules(tmp_path / "train.py", framework="none")) == modules


def test_cycles_and_large_containers_end() -> None:
    cycle: list[Any] = [0] * 1_000_000
    cycle[0] = cycle
    assert find_preload_modules(lambda: cycle, {"data": cycle}) == ()
