"""BackendConfig: by default nothing is set up and no hook wants to be called."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.frameworks.config import Backend, BackendConfig, hooks_of
from spotfit.model.config import ScalingConfig


class Mine(Backend):
    """A user's own."""


class Another(Mine):
    """And one more."""


@dataclass
class Settings(BackendConfig):
    """Has fields, and hooks that may be anything."""

    page: str = "p"
    kind: Any = Mine

    @property
    def backend_cls(self) -> Any:
        return self.kind


@dataclass
class Library(BackendConfig):
    """Of a framework that came with a package."""

    width: int = 3

    @property
    def framework(self) -> str:
        return "their_library"


def test_by_default_nothing_is_set_up() -> None:
    config = BackendConfig()
    assert (config.framework, config.to_dict()) == ("none", {})
    assert config.train_func_context is nullcontext
    assert config.backend_cls is Backend
    assert hooks_of(config) is None


def test_the_hooks_of_a_backend_do_nothing_until_they_are_written() -> None:
    backend = Backend()
    for hook in (backend.on_start, backend.on_training_start, backend.on_shutdown):
        hook(None, None)
    assert not Backend.share_cuda_visible_devices
    assert not Backend.has_replica_groups


def test_each_class_of_a_backend_has_one_object() -> None:
    assert Mine() is Mine()
    assert Another() is not Mine()
    assert type(Another()) is Another


def test_a_backend_of_the_users_own_has_hooks() -> None:
    assert hooks_of(Settings()) is Mine


@pytest.mark.parametrize("kind", [int, "Mine", None, Mine()])
def test_what_is_no_backend_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"Settings\.backend_cls is .*, no subclass of"):
        hooks_of(Settings(kind=kind))


def test_fields_reach_the_workers_of_a_framework_and_nobody_else() -> None:
    scaling = ScalingConfig(num_workers=2)
    assert Settings().framework_options(scaling) == ("none", {})
    assert Settings().to_dict() == {"page": "p", "kind": Mine}
    assert Library().framework_options(scaling) == ("their_library", {"width": 3})
