"""What of Ray Train is compared: module by module, with where it lives here.

Training of torch models and everything around it. Ray Data's datasets and the trainers of other
frameworks are not compared: they are not part of this package yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

RAY_VERSION = "2.60.0"

RAY_MODULES: Mapping[str, tuple[str, ...]] = {
    "ray.train": (),
    "ray.train.backend": ("Backend", "BackendConfig"),
    "ray.train.collective": (),
    "ray.train.error": ("SessionMisuseError",),
    "ray.train.torch": (),
    "ray.train.torch.xla": (),
    "ray.train.v2.api.data_parallel_trainer": ("DataParallelTrainer",),
    "ray.train.v2.torch.torchft_config": ("TorchftConfig",),
    "ray.train.v2._internal.execution.context": ("TrainRunContext",),
}
"""Modules of Ray, and what of each; with no names, all of its `__all__`."""

SPOTFIT_MODULES: Mapping[str, str] = {
    "ray.train": "spotfit",
    "ray.train.backend": "spotfit.backend",
    "ray.train.collective": "spotfit.collective",
    "ray.train.error": "spotfit",
    "ray.train.torch": "spotfit.torch",
    "ray.train.torch.xla": "spotfit.torch.xla",
    "ray.train.v2.api.data_parallel_trainer": "spotfit",
    "ray.train.v2.torch.torchft_config": "spotfit.torch",
    "ray.train.v2._internal.execution.context": "spotfit.model.user_callback",
}
"""Where each of them lives here."""

ENVIRONMENT = "environment"
CONSTANTS = ("ray.train.constants", "ray.train.v2._internal.constants")
"""Where Ray names the environment variables it reads."""
VARIABLE = re.compile(r"(?:RAY_TRAIN|RAY_CHDIR|TORCH_PROCESS|JAX_DISTRIBUTED)_[A-Z0-9_]+")

EXAMPLES: Mapping[str, Callable[[Any], Any]] = {
    "Checkpoint": lambda kind: kind("/tmp"),  # noqa: S108 - a path that is only written down
    "ControllerError": lambda kind: kind(ValueError()),
    "NCCLHangError": lambda kind: kind("", {}),
    "PreemptionError": lambda kind: kind(SimpleNamespace(preempted_ranks=[], deadline_ms=0)),
    "ValidationConfig": lambda kind: kind(print),
    "WorkerGroupError": lambda kind: kind("", {}),
}
"""How to make one of those whose attributes the class does not show."""
