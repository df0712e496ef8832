"""TorchftConfig: a lighthouse beside the leader, whose place every worker is told."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spotfit.core.errors import MissingExtraError
from spotfit.frameworks.torch.config import TorchConfig
from spotfit.frameworks.torch.torchft_config import TorchftBackend, TorchftConfig
from spotfit.model.config import ScalingConfig


class OneWorker:
    """A group whose only worker is this process."""

    def execute(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return [fn(*args)]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchftBackend]:
    monkeypatch.setenv("SPOTFIT_HOST", "127.0.0.1")
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "")
    made = TorchftBackend()
    yield made
    made.on_shutdown(OneWorker(), None)


def test_it_is_a_torch_config_with_a_lighthouse() -> None:
    config = TorchftConfig({"min_replicas": 1}, timeout_s=60)
    assert isinstance(config, TorchConfig)
    assert dataclasses.is_dataclass(config)
    assert config.backend_cls is TorchftBackend
    name, options = config.framework_options(ScalingConfig())
    assert name == "torchft"
    assert (options["backend"], options["timeout_s"]) == ("gloo", 60)
    assert options["lighthouse_kwargs"] == {"min_replicas": 1}


def test_every_attempt_has_a_lighthouse_of_its_own(backend: TorchftBackend) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed")
    places = set()
    for _ in range(2):
        backend.on_start(OneWorker(), TorchftConfig({"min_replicas": 1}))
        places.add(os.environ["TORCHFT_LIGHTHOUSE"])
    assert len(places) == 2
    assert all(place.startswith("http://127.0.0.1:") for place in places)


def test_without_torchft_it_is_named(backend: TorchftBackend) -> None:
    try:
        import torchft  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match="needs the package torchft"):
            backend.on_start(OneWorker(), TorchftConfig({"min_replicas": 1}))
