"""BackendConfig: by default nothing is set up and no hook is called."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.frameworks.backend_config import Backend, BackendConfig, backend_hooks_class
from spotfit.model.config import ScalingConfig


class UserBackend(Backend):
    """A user-defined backend."""


class OtherBackend(UserBackend):
    """A second user-defined backend."""


@dataclass
class Settings(BackendConfig):
    """A configuration with fields and an arbitrary `backend_cls`."""

    page: str = "p"
    kind: Any = UserBackend

    @property
    def backend_cls(self) -> Any:
        return self.kind


@dataclass
class Library(BackendConfig):
    """A configuration for the framework of another package."""

    width: int = 3

    @property
    def framework(self) -> str:
        return "their_library"


def test_the_default_configuration_sets_up_nothing() -> None:
    config = BackendConfig()
    assert (config.framework, config.to_dict()) == (None, {})
    assert config.train_func_context is nullcontext
    assert config.backend_cls is Backend
    assert backend_hooks_class(config) is None


def test_the_default_hooks_do_nothing() -> None:
    backend = Backend()
    for hook in (backend.on_start, backend.on_training_start, backend.on_shutdown):
        hook(None, None)
    assert not Backend.share_cuda_visible_devices
    assert not Backend.has_replica_groups


def test_each_backend_class_has_one_instance() -> None:
    assert UserBackend() is UserBackend()
    assert OtherBackend() is not UserBackend()
    assert type(OtherBackend()) is OtherBackend


def test_a_user_defined_backend_has_hooks() -> None:
    assert backend_hooks_class(Settings()) is UserBackend


@pytest.mark.parametrize("kind", [int, "UserBackend", None, UserBackend()])
def test_a_class_that_is_not_a_backend_is_rejected(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"Settings\.backend_cls is .*is not a subclass of"):
        backend_hooks_class(Settings(kind=kind))


def test_fields_are_passed_only_to_workers_of_a_framework() -> None:
    scaling = ScalingConfig(num_workers=2)
    assert Settings().framework_options(scaling) == ("none", {})
    assert Settings().to_dict() == {"page": "p", "kind": UserBackend}
    assert Library().framework_options(scaling) == ("their_library", {"width": 3})
