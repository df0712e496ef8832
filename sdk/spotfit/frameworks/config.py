"""What every backend's options have in common."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from spotfit.model.config import ScalingConfig


class BackendConfig:
    """How the workers' training library is set up; this one sets up nothing.

    Derive from it as a dataclass: its fields reach the workers as `framework_options`.
    """

    @property
    def framework(self) -> str:
        """The name under which the workers find the framework."""
        return "none"

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[Any]]:
        """Makes a context that is entered around the training function, on every worker."""
        return nullcontext

    def framework_options(self, scaling: ScalingConfig) -> tuple[str, dict[str, Any]]:
        """The framework's name, and its options as plain data, for workers of that scaling."""
        return self.framework, self.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """Its fields, as plain data."""
        return dict(vars(self))
