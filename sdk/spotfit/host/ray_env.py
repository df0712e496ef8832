"""Environment variables of Ray Train.

Supported variables are listed in `env`, as `EnvVar.ray_name`. `ignored_ray_variables` reports the
others if they are set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from spotfit.host import env

_PREFIX = "RAY_TRAIN_"


class UnsupportedRayVariable(NamedTuple):
    """A variable of Ray Train that spotfit ignores."""

    ray_default: str
    """Ray's default. Setting the variable to this value changes nothing, so it is not reported."""
    explanation: str
    """How spotfit behaves instead."""


UNSUPPORTED_RAY_VARIABLES: Mapping[str, UnsupportedRayVariable] = {
    "RAY_TRAIN_V2_ENABLED": UnsupportedRayVariable("1", "spotfit implements only the V2 API"),
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": UnsupportedRayVariable(
        "2", "agents send a heartbeat to the leader every second"
    ),
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": UnsupportedRayVariable(
        "60",
        "use SPOTFIT_WORKER_GROUP_START_TIMEOUT_S: the time from the start of workers on granted "
        "machines until the training function starts, including installation and imports",
    ),
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": UnsupportedRayVariable(
        "1", "preemption notices are always handled"
    ),
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": UnsupportedRayVariable(
        "5", "preemption notices are polled 4 times per second"
    ),
    "RAY_TRAIN_ENABLE_PRINT_PATCH": UnsupportedRayVariable(
        "1", "all output of worker processes is captured"
    ),
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": UnsupportedRayVariable(
        "1", "logs are always lines of JSON"
    ),
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": UnsupportedRayVariable(
        "1", "logs are always lines of JSON"
    ),
    "RAY_TRAIN_METRICS_ENABLED": UnsupportedRayVariable(
        "1", "the run's journal contains the events to measure"
    ),
    "RAY_TRAIN_ENABLE_STATE_TRACKING": UnsupportedRayVariable(
        "0", "the run's journal is its state"
    ),
    "RAY_CHDIR_TO_TRIAL_DIR": UnsupportedRayVariable(
        "1", "workers start in working_dir, or in a scratch directory of their node"
    ),
}


def ignored_ray_variables(
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield the name of every ignored Ray variable that is set, and how spotfit behaves instead."""
    environment = os.environ if environment is None else environment
    supported = {env_var.ray_name for env_var in env.ENV_VARS}
    for name in sorted(environment):
        known = UNSUPPORTED_RAY_VARIABLES.get(name)
        if name in supported or not (known or name.startswith(_PREFIX)):
            continue
        if known is None:
            yield name, "spotfit has no variable of this name"
        elif environment[name] not in ("", known.ray_default):
            yield name, known.explanation
