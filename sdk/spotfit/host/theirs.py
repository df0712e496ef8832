"""Ray Train's variables: some are heard under their own names; of the others it is told what holds.

Those that are heard stand in `env`, as `Setting.also`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from spotfit.host import env

_PREFIX = "RAY_TRAIN_"


class Theirs(NamedTuple):
    """A variable of Ray's without effect here."""

    usual: str
    """Its value in Ray where nobody sets it; saying so changes nothing in either."""
    instead: str
    """What holds here."""


WITHOUT_EFFECT: Mapping[str, Theirs] = {
    "RAY_TRAIN_V2_ENABLED": Theirs("1", "there is no other API than V2's"),
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": Theirs("2", "machines greet their leader every second"),
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": Theirs(
        "60",
        "SPOTFIT_WORKER_GROUP_START_TIMEOUT_S says how long workers that have machines may take to "
        "come to the function, with all that must be installed and imported before",
    ),
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": Theirs("1", "notices are always heeded"),
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": Theirs("5", "notices are looked for 4 times a second"),
    "RAY_TRAIN_ENABLE_PRINT_PATCH": Theirs("1", "output is kept as it is written, by whomever"),
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": Theirs("1", "logs are always lines of JSON"),
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": Theirs("1", "logs are always lines of JSON"),
    "RAY_TRAIN_METRICS_ENABLED": Theirs("1", "the run's journal tells what there is to measure"),
    "RAY_TRAIN_ENABLE_STATE_TRACKING": Theirs("0", "the run's journal is its state"),
    "RAY_CHDIR_TO_TRIAL_DIR": Theirs(
        "1", "workers start in their working_dir, else in a scratch directory of their node"
    ),
}


def without_effect(environment: Mapping[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """Those of Ray's variables that somebody set to no effect, and what holds instead."""
    told = os.environ if environment is None else environment
    heard = {setting.also for setting in env.SETTINGS}
    for name in sorted(told):
        known = WITHOUT_EFFECT.get(name)
        if name in heard or not (known or name.startswith(_PREFIX)):
            continue
        if known is None:
            yield name, "there is nothing of that name here"
        elif told[name] not in ("", known.usual):
            yield name, known.instead
