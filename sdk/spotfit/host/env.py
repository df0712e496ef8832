"""The environment: its only reader and writer, and one table of what we ask it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from spotfit.core import units
from spotfit.core.errors import ConfigError
from spotfit.core.levels import parse_level
from spotfit.core.mistakes import Mistakes

Value = TypeVar("Value")
_SWITCHES = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True)
class Setting(Generic[Value]):
    """One variable: how its text is read, what holds without it, and what it means."""

    name: str
    parse: Callable[[str], Value]
    default: Value
    meaning: str
    also: str = ""
    """Ray Train's name for it, heard where ours is not set."""


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise ConfigError(f"{text!r} is no port.", do="Write a number from 0 to 65535.")
    return int(text)


def _some_seconds(text: str) -> float:
    seconds = units.seconds(text)
    if seconds <= 0:
        raise ConfigError(f"{text!r} is no time at all.", do="Write a number of seconds above 0.")
    return seconds


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCHES:
        raise ConfigError(f"{text!r} is neither 1 nor 0.", do="Write 1 for yes, 0 for no.")
    return _SWITCHES[text.lower()]


def _hang_action(text: str) -> str:
    if text.lower() not in ("observe", "fail"):
        raise ConfigError(f"{text!r} is no such action.", do="Write 'observe' or 'fail'.")
    return text.lower()


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


LOG_LEVEL = Setting("SPOTFIT_LOG_LEVEL", parse_level, "INFO", "the least level that is logged")
HOST = Setting("SPOTFIT_HOST", str, "", "address at which other nodes reach this one")
PORT = Setting("SPOTFIT_PORT", _port, 0, "port of this node's hub; 0 takes any")
SCRATCH = Setting("SPOTFIT_SCRATCH", str, "", "directory of this node that may be filled")
FRAMEWORK = Setting("SPOTFIT_FRAMEWORK", str, "", "what to import before the run is known")
DEVICES = Setting("SPOTFIT_DEVICES", str, "", "accelerators to use, as 'cuda:0,cuda:1'")
NOTICE_FILE = Setting("SPOTFIT_NOTICE_FILE", str, "", "a file whose appearance is a notice")
SIGNAL_GRACE_S = Setting(
    "SPOTFIT_SIGNAL_GRACE_S",
    units.seconds,
    0.0,
    "how long a machine stays after SIGTERM, or after a notice that says no time, if known",
)
KUBERNETES_NODE = Setting(
    "SPOTFIT_KUBERNETES_NODE", str, "", "in a pod: its node, whose taints tell that it will go"
)
KUBERNETES_API = Setting(
    "SPOTFIT_KUBERNETES_API", str, "", "the API server, where a pod's own environment is wrong"
)
CLOUD = Setting(
    "SPOTFIT_CLOUD",
    str,
    "",
    "whose VM a machine is, where it is not to find out itself: 'aws', 'azure', 'gcp' or 'none'",
)
FORK = Setting("SPOTFIT_FORK", str, "auto", "'never' starts every worker in a new interpreter")
HOME_DIR = Setting("SPOTFIT_HOME", str, "~/.spotfit", "where this user's keys are kept")
PROVISIONER = Setting("SPOTFIT_PROVISIONER", str, "", "who gives machines, with options")
CONFIG = Setting("SPOTFIT_CONFIG", str, "", "file with options of backends, for spotfit.toml")
PROFILE = Setting("SPOTFIT_PROFILE", str, "", "which profile of spotfit.toml holds")
RUN_SECRET = Setting("SPOTFIT_RUN_SECRET", str, "", "the key of a run, as text")
STORAGE_KEYS = Setting(
    "SPOTFIT_STORAGE_KEYS", str, "", "credentials of a run's bucket, which fit() tells its machines"
)
COLLECTIVE_TIMEOUT_S = Setting(
    "SPOTFIT_COLLECTIVE_TIMEOUT_S",
    units.seconds,
    0.0,
    "how long collectives wait; 0: for ever",
    also="RAY_TRAIN_COLLECTIVE_TIMEOUT_S",
)
COLLECTIVE_WARN_S = Setting(
    "SPOTFIT_COLLECTIVE_WARN_INTERVAL_S",
    _some_seconds,
    60.0,
    "how often a collective that waits says for whom",
    also="RAY_TRAIN_COLLECTIVE_WARN_INTERVAL_S",
)
CALLBACKS: Setting[tuple[str, ...]] = Setting(
    "SPOTFIT_CALLBACKS",
    _names,
    (),
    "classes of callbacks every run gets, as 'package.module.Class,...'",
    also="RAY_TRAIN_CALLBACKS",
)
HEALTH_TIMEOUT_S = Setting(
    "SPOTFIT_WORKER_HEALTH_CHECK_TIMEOUT_S",
    units.seconds,
    600.0,
    "how long a worker may not answer before it counts as dead; 0: for ever",
    also="RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S",
)
START_TIMEOUT_S = Setting(
    "SPOTFIT_WORKER_GROUP_START_TIMEOUT_S",
    units.seconds,
    1800.0,
    "how long workers that have machines may take to come to the function; 0: for ever",
)
DETECT_HANGS = Setting(
    "SPOTFIT_ENABLE_HANG_DETECTOR",
    _switch,
    default=False,
    meaning="whether a round in which no rank gets on is looked into",
    also="RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR",
)
HANG_CONFIRM_S = Setting(
    "SPOTFIT_HANG_CONFIRM_DURATION_S",
    _some_seconds,
    600.0,
    "how long no rank must have got on",
    also="RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S",
)
HANG_ACTION = Setting(
    "SPOTFIT_HANG_ACTION",
    _hang_action,
    "observe",
    "'observe' keeps the stacks of all ranks, 'fail' ends the attempt, too",
    also="RAY_TRAIN_NCCL_RAS_ACTION",
)
UPLOAD_WARN_S = Setting(
    "SPOTFIT_CHECKPOINT_UPLOAD_WARN_INTERVAL_S",
    units.seconds,
    60.0,
    "how often a checkpoint that is still being uploaded is told",
    also="RAY_TRAIN_CHECKPOINT_UPLOAD_WARN_INTERVAL_S",
)
LEAVE_S = Setting(
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S",
    units.seconds,
    30.0,
    "how long leaving a process group may take",
)

SETTINGS: tuple[Setting[object], ...] = (
    LOG_LEVEL,  # type: ignore[assignment]  # a setting of str is read as one of object
    HOST,
    PORT,
    SCRATCH,
    FRAMEWORK,
    DEVICES,
    NOTICE_FILE,
    SIGNAL_GRACE_S,
    KUBERNETES_NODE,
    KUBERNETES_API,
    CLOUD,
    FORK,
    HOME_DIR,
    PROVISIONER,
    CONFIG,
    PROFILE,
    RUN_SECRET,
    STORAGE_KEYS,
    COLLECTIVE_TIMEOUT_S,
    COLLECTIVE_WARN_S,
    CALLBACKS,
    UPLOAD_WARN_S,
    HEALTH_TIMEOUT_S,
    START_TIMEOUT_S,
    DETECT_HANGS,
    HANG_CONFIRM_S,
    HANG_ACTION,
    LEAVE_S,
)


def value(setting: Setting[Value], environment: Mapping[str, str] | None = None) -> Value:
    """What the environment says, else the default. Raises `ConfigError` naming the variable."""
    name, text = _said(setting, os.environ if environment is None else environment)
    if not text:
        return setting.default
    try:
        return setting.parse(text)
    except (ConfigError, ValueError) as wrong:
        raise ConfigError(
            f"{name} ({setting.meaning}) cannot be {text!r}: {wrong}",
            do=f"Correct the variable, or unset it: then {setting.default!r} holds.",
        ) from wrong


def _said(setting: Setting[Value], environment: Mapping[str, str]) -> tuple[str, str]:
    """By which name it was set, and what was said."""
    heard = [name for name in (setting.name, setting.also) if name and environment.get(name)]
    return (heard[0], environment[heard[0]]) if heard else (setting.name, "")


def check(environment: Mapping[str, str] | None = None) -> None:
    """Read every setting once, so that all mistakes are told together. Raises `ConfigError`."""
    mistakes = Mistakes()
    for setting in SETTINGS:
        mistakes.check(partial(value, setting, environment))
    mistakes.raise_all()


def everything() -> dict[str, str]:
    """A copy of the whole environment."""
    return dict(os.environ)


def lookup(name: str) -> str | None:
    """One variable that is not ours."""
    return os.environ.get(name)


def update(values: Mapping[str, str]) -> None:
    """Set variables of this process and of what it starts."""
    os.environ.update(values)


def set_defaults(values: Mapping[str, str]) -> None:
    """Set those that nobody has set."""
    for name, text in values.items():
        os.environ.setdefault(name, text)


def replace(values: Mapping[str, str]) -> None:
    """Make these the whole environment."""
    os.environ.clear()
    os.environ.update(values)


def forget(*names: str) -> None:
    """Unset variables: secrets that nobody started from here should find."""
    for name in names:
        os.environ.pop(name, None)
