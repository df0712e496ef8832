"""TensorFlow's configuration and cluster."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import sys
from types import ModuleType

import pytest

from spotfit.core.errors import MissingExtraError
from spotfit.frameworks.backend_config import backend_hooks_class
from spotfit.frameworks.registry import open_framework
from spotfit.frameworks.tensorflow.tensorflow_config import TensorflowConfig, TensorflowFramework
from spotfit.host import env
from spotfit.model.config import ScalingConfig
from tests.unit.frameworks.workers import a_worker_start


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variables that the framework sets, and let tensorflow be installed."""
    monkeypatch.setenv("TF_CONFIG", "")
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    monkeypatch.setitem(sys.modules, "tensorflow", ModuleType("tensorflow"))


def install_legacy_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tf_keras")
    module.__spec__ = importlib.machinery.ModuleSpec("tf_keras", None)
    monkeypatch.setitem(sys.modules, "tf_keras", module)


def gather_two(label: str, value: bytes) -> tuple[bytes, ...]:
    assert label == "tensorflow_cluster"
    return (b"10.0.0.1:7000", value)


def test_the_workers_use_the_framework() -> None:
    assert TensorflowConfig().framework_options(ScalingConfig()) == ("tensorflow", {})
    assert isinstance(open_framework("tensorflow"), TensorflowFramework)
    assert backend_hooks_class(TensorflowConfig()) is None


def test_workers_use_the_legacy_keras_unless_the_user_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = a_worker_start(rank=1, world_size=2)
    variables = TensorflowFramework().environment(start)
    assert (variables["RANK"], variables["TF_USE_LEGACY_KERAS"]) == ("1", "1")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")
    assert TensorflowFramework().environment(start)["TF_USE_LEGACY_KERAS"] == "0"


def test_the_cluster_has_the_addresses_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    install_legacy_keras(monkeypatch)
    start = a_worker_start(rank=1, world_size=2, host="10.0.0.2")
    TensorflowFramework().form_group(start, gather_two)
    config = json.loads(env.lookup("TF_CONFIG") or "")
    assert config["task"] == {"type": "worker", "index": 1}
    first, second = config["cluster"]["worker"]
    assert first == "10.0.0.1:7000"
    host, _, port = second.partition(":")
    assert host == "10.0.0.2"
    assert int(port) > 0


def test_a_missing_legacy_keras_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    framework = TensorflowFramework()
    with pytest.raises(MissingExtraError, match="its package tf-keras is not") as caught:
        framework.form_group(a_worker_start(rank=1, world_size=2), gather_two)
    assert caught.value.details["module"] == "tf_keras"
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")
    framework.form_group(a_worker_start(rank=1, world_size=2), gather_two)


def test_a_machine_without_tensorflow_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(MissingExtraError, match="tensorflow"):
        TensorflowFramework().form_group(a_worker_start(), gather_two)


def test_the_legacy_keras_is_required_unless_the_user_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = TensorflowConfig()
    assert config.required_modules({}) == ("tf_keras",)
    assert config.required_modules({"TF_USE_LEGACY_KERAS": "0"}) == ()
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "false")
    assert config.required_modules({}) == ()


def test_the_fork_server_imports_tensorflow_for_the_legacy_keras() -> None:
    name = "spotfit.frameworks.tensorflow.preload_tensorflow"
    assert name in TensorflowFramework.preload_modules
    sys.modules.pop(name, None)
    importlib.import_module(name)
    assert env.lookup("TF_USE_LEGACY_KERAS") == "1"
