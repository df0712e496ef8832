"""The parts of TensorFlow that spotfit.tensorflow uses, for environments without it."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Callback:
    """Keras's base class of callbacks."""

    model: Any = None
    params: Any = None


class Model:
    """A Keras model of one weight, whose optimizer has state once it is built."""

    def __init__(self, weight: float = 0.0) -> None:
        self.weight = weight
        self.optimizer = SimpleNamespace(build=self._build, is_built=False)
        self.trainable_variables = ["w"]
        self.distribute_strategy = SimpleNamespace(scope=nullcontext)

    def save(self, path: str) -> None:
        Path(path).write_text(json.dumps(self.weight))

    def load_weights(self, path: str) -> None:
        assert self.optimizer.is_built, "the state of the optimizer would not be loaded"
        self.weight = json.loads(Path(path).read_text())

    def _build(self, variables: list[str]) -> None:
        assert variables == self.trainable_variables
        self.optimizer.is_built = True


class LegacyOptimizer:
    """An optimizer of tf.keras.optimizers.legacy, whose state is in no saved model."""

    def __init__(self) -> None:
        self.state: list[float] = []

    def _create_all_weights(self, variables: list[str]) -> None:
        self.state = [0.0 for _ in variables]

    def get_weights(self) -> list[float]:
        return self.state

    def set_weights(self, weights: list[Any]) -> None:
        assert len(weights) == len(self.state)
        self.state = [float(one) for one in weights]


class LegacyModel(Model):
    """A Keras model with a legacy optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer: Any = LegacyOptimizer()

    def load_weights(self, path: str) -> None:
        self.weight = json.loads(Path(path).read_text())


class Options:
    """tf.data.Options."""

    def __init__(self) -> None:
        self.experimental_distribute = SimpleNamespace(auto_shard_policy="auto")


def load_model(path: str) -> Any:
    """Return the model of `Model.save`, or the path if it is a directory."""
    return path if Path(path).is_dir() else Model(json.loads(Path(path).read_text()))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import tensorflow` give these parts, and modules of ours be imported with them."""
    callbacks: Any = ModuleType("tensorflow.keras.callbacks")
    callbacks.Callback = Callback
    keras: Any = ModuleType("tensorflow.keras")
    keras.callbacks, keras.models = callbacks, SimpleNamespace(load_model=load_model)
    tensorflow: Any = ModuleType("tensorflow")
    tensorflow.keras = keras
    policy = SimpleNamespace(OFF="off")
    tensorflow.data = SimpleNamespace(
        AUTOTUNE=-1, Options=Options, experimental=SimpleNamespace(AutoShardPolicy=policy)
    )
    for module in (tensorflow, keras, callbacks):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "spotfit.tensorflow.keras_callback", raising=False)
