"""Environment variables: the table of all settings, and the only access to `os.environ`.

Environment variables of Ray Train.

Supported variables are listed in `env`, as `EnvVar.ray_name`. `ignored_ray_variables` reports the
others if they are set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from spotfit.core import units
from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import ErrorCollector, parse_log_level

Value = TypeVar("Value")
_BOOL_TEXTS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True)
class EnvVar(Generic[Value]):
    """An environment variable: parser, default value and a description for error messages."""

    name: str
    parse: Callable[[str], Value]
    default: Value
    description: str
    ray_name: str = ""
    """Name of the equivalent variable of Ray Train, read if `name` is not set."""


def _parse_port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise ConfigError(f"{text!r} is not a valid port.", do="Write a number from 0 to 65535.")
    return int(text)


def _parse_positive_seconds(text: str) -> float:
    seconds = units.parse_seconds(text)
    if seconds <= 0:
        raise ConfigError(
            f"{text!r} is not a valid interval.", do="Write a number of seconds above 0."
        )
    return seconds


def _parse_bool(text: str) -> bool:
    if text.lower() not in _BOOL_TEXTS:
        raise ConfigError(f"{text!r} is not a boolean.", do="Write 1 for yes, 0 for no.")
    return _BOOL_TEXTS[text.lower()]


def _parse_hang_action(text: str) -> str:
    if text.lower() not in ("observe", "fail"):
        raise ConfigError(f"{text!r} is not a valid action.", do="Write 'observe' or 'fail'.")
    return text.lower()


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


LOG_LEVEL = EnvVar("SPOTFIT_LOG_LEVEL", parse_log_level, "INFO", "lowest level that is logged")
HOST = EnvVar("SPOTFIT_HOST", str, "", "address at which other nodes reach this node")
PORT = EnvVar("SPOTFIT_PORT", _parse_port, 0, "port of this node's agent; 0 selects a free port")
SCRATCH_DIR = EnvVar("SPOTFIT_SCRATCH", str, "", "scratch directory of this node")
FRAMEWORK = EnvVar(
    "SPOTFIT_FRAMEWORK", str, "", "framework to import before the node is assigned to a run"
)
PRELOAD = EnvVar("SPOTFIT_PRELOAD", str, "", "modules to import with SPOTFIT_FRAMEWORK, as 'a,b.c'")
DEVICES = EnvVar("SPOTFIT_DEVICES", str, "", "accelerators to use, as 'cuda:0,cuda:1'")
NOTICE_FILE = EnvVar("SPOTFIT_NOTICE_FILE", str, "", "file whose creation is a preemption notice")
SIGNAL_GRACE_S = EnvVar(
    "SPOTFIT_SIGNAL_GRACE_S",
    units.parse_seconds,
    0.0,
    "seconds between SIGTERM, or a preemption notice without a deadline, and the machine's end",
)
INSTANCE = EnvVar(
    "SPOTFIT_INSTANCE",
    str,
    "",
    "id of this machine's instance; nodes with equal ids are lost together",
)
KUBERNETES_NODE = EnvVar(
    "SPOTFIT_KUBERNETES_NODE", str, "", "in a pod: name of its node, watched for eviction taints"
)
KUBERNETES_API = EnvVar(
    "SPOTFIT_KUBERNETES_API", str, "", "URL of the API server, overrides the pod's environment"
)
CLOUD = EnvVar(
    "SPOTFIT_CLOUD",
    str,
    "",
    "cloud of this machine ('aws', 'azure', 'gcp' or 'none'); detected if not set",
)
FORK_MODE = EnvVar("SPOTFIT_FORK", str, "auto", "'never' starts each worker in a new interpreter")
HOME_DIR = EnvVar("SPOTFIT_HOME", str, "~/.spotfit", "directory of this user's run keys")
PROVISIONER = EnvVar("SPOTFIT_PROVISIONER", str, "", "default provisioner and its options")
CONFIG_FILE = EnvVar("SPOTFIT_CONFIG", str, "", "path of the options file, by default spotfit.toml")
PROFILE = EnvVar("SPOTFIT_PROFILE", str, "", "profile of spotfit.toml to use")
RUN_ID = EnvVar("SPOTFIT_RUN_ID", str, "", "id of the run whose key is in SPOTFIT_RUN_SECRET")
RUN_SECRET = EnvVar("SPOTFIT_RUN_SECRET", str, "", "secret key of a run, as text")
STORAGE_KEYS = EnvVar(
    "SPOTFIT_STORAGE_KEYS", str, "", "credentials of the run's bucket, passed to nodes by fit()"
)
COLLECTIVE_TIMEOUT_S = EnvVar(
    "SPOTFIT_COLLECTIVE_TIMEOUT_S",
    units.parse_seconds,
    0.0,
    "timeout of spotfit.collective functions in seconds; 0 means no timeout",
    ray_name="RAY_TRAIN_COLLECTIVE_TIMEOUT_S",
)
COLLECTIVE_WARN_INTERVAL_S = EnvVar(
    "SPOTFIT_COLLECTIVE_WARN_INTERVAL_S",
    _parse_positive_seconds,
    60.0,
    "interval of warnings that name the ranks missing in a collective",
    ray_name="RAY_TRAIN_COLLECTIVE_WARN_INTERVAL_S",
)
CALLBACKS: EnvVar[tuple[str, ...]] = EnvVar(
    "SPOTFIT_CALLBACKS",
    _parse_names,
    (),
    "callback classes added to every run, as 'package.module.Class,...'",
    ray_name="RAY_TRAIN_CALLBACKS",
)
HEALTH_TIMEOUT_S = EnvVar(
    "SPOTFIT_WORKER_HEALTH_CHECK_TIMEOUT_S",
    units.parse_seconds,
    600.0,
    "seconds without a heartbeat after which a worker counts as dead; 0 means no timeout",
    ray_name="RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S",
)
START_TIMEOUT_S = EnvVar(
    "SPOTFIT_WORKER_GROUP_START_TIMEOUT_S",
    units.parse_seconds,
    1800.0,
    "seconds from the start of workers to the training function; 0 means no timeout",
)
DETECT_HANGS = EnvVar(
    "SPOTFIT_ENABLE_HANG_DETECTOR",
    _parse_bool,
    default=False,
    description="whether to act when no rank makes progress",
    ray_name="RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR",
)
HANG_CONFIRM_S = EnvVar(
    "SPOTFIT_HANG_CONFIRM_DURATION_S",
    _parse_positive_seconds,
    600.0,
    "seconds without progress on any rank that count as a hang",
    ray_name="RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S",
)
HANG_ACTION = EnvVar(
    "SPOTFIT_HANG_ACTION",
    _parse_hang_action,
    "observe",
    "'observe' stores the stacks of all ranks, 'fail' also ends the round",
    ray_name="RAY_TRAIN_NCCL_RAS_ACTION",
)
UPLOAD_WARN_INTERVAL_S = EnvVar(
    "SPOTFIT_CHECKPOINT_UPLOAD_WARN_INTERVAL_S",
    units.parse_seconds,
    60.0,
    "interval of warnings about a slow checkpoint upload",
    ray_name="RAY_TRAIN_CHECKPOINT_UPLOAD_WARN_INTERVAL_S",
)
PROCESS_GROUP_SHUTDOWN_TIMEOUT_S = EnvVar(
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S",
    units.parse_seconds,
    30.0,
    "seconds that destroy_process_group() may take",
)
JAX_SHUTDOWN_TIMEOUT_S = EnvVar(
    "JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S",
    units.parse_seconds,
    30.0,
    "seconds that jax.distributed.shutdown() may take",
)

# Collected instead of listed, so that `check_all` cannot miss one.
ENV_VARS: tuple[EnvVar[Any], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, EnvVar)
)


def read(env_var: EnvVar[Value], environment: Mapping[str, str] | None = None) -> Value:
    """Return the parsed value of `env_var`, or its default if it is unset or empty.

    Reads `environment`, or that of this process (None). If only the equivalent variable of Ray
    Train (`EnvVar.ray_name`) is set, that one is read. Raises `ConfigError` with the name of the
    variable for an invalid value.
    """
    environment = os.environ if environment is None else environment
    # Our name takes precedence over Ray's. An empty value counts as unset, as in most shells.
    names = [name for name in (env_var.name, env_var.ray_name) if name and environment.get(name)]
    name, text = (names[0], environment[names[0]]) if names else (env_var.name, "")
    if not text:
        return env_var.default
    try:
        return env_var.parse(text)
    except (ConfigError, ValueError) as error:
        remedy = error.do if isinstance(error, ConfigError) else "Correct the value."
        raise ConfigError(
            f"The environment variable {name} ({env_var.description}) is invalid: {error.args[0]}",
            do=f"{remedy} Or unset it to use the default {env_var.default!r}.",
        ) from error


def check_all(environment: Mapping[str, str] | None = None) -> None:
    """Parse every variable of spotfit, to report invalid values before a run starts.

    Reads `environment`, or that of this process (None). Called by `fit()` and by each agent at its
    start. Raises `ConfigError`, or `ConfigErrors` with all invalid ones.
    """
    errors = ErrorCollector()
    for env_var in ENV_VARS:
        errors.check(partial(read, env_var, environment))
    errors.raise_all()


def copy_environment() -> dict[str, str]:
    """Return all environment variables of this process as a new dict."""
    return dict(os.environ)


def lookup(name: str) -> str | None:
    """Return the unparsed value of any environment variable, or None if it is unset.

    Unlike `read` it returns '' for an empty variable, and knows no default.
    """
    return os.environ.get(name)


def update(values: Mapping[str, str]) -> None:
    """Set environment variables of this process, which its future child processes inherit.

    Replaces variables that are set, and keeps those that are not in `values`.
    """
    os.environ.update(values)


def set_defaults(values: Mapping[str, str]) -> None:
    """Set those environment variables of this process that are not set yet.

    A variable with an empty value counts as set.
    """
    for name, text in values.items():
        os.environ.setdefault(name, text)


def replace_all(values: Mapping[str, str]) -> None:
    """Replace the whole environment of this process, which future children inherit, by `values`."""
    # In place: assigning a new os.environ would not change the environment of the C library.
    os.environ.clear()
    os.environ.update(values)


def unset(*names: str) -> None:
    """Remove environment variables of this process; those that are not set are ignored.

    For example secrets that child processes must not inherit.
    """
    for name in names:
        os.environ.pop(name, None)


# --- Environment variables of Ray Train -----------------------------------------------------------


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
    """Yield each variable of Ray Train that is set without effect, and how spotfit behaves instead.

    Reads `environment`, or that of this process (None). `fit()` logs the pairs (name, explanation),
    sorted by name. A variable that is set to Ray's default is left out.
    """
    environment = os.environ if environment is None else environment
    supported = {env_var.ray_name for env_var in ENV_VARS}
    for name in sorted(environment):
        known = UNSUPPORTED_RAY_VARIABLES.get(name)
        if name in supported or not (known or name.startswith(_PREFIX)):
            continue
        if known is None:
            yield name, "spotfit has no variable of this name"
        elif environment[name] not in ("", known.ray_default):
            yield name, known.explanation
