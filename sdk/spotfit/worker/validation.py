"""The process that validates one checkpoint: reads what, calls the user's function, tells."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
from typing import Any, NoReturn

from spotfit.checkpoint.handle import Checkpoint
from spotfit.checkpoint.restore import open_committed
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import ConfigError
from spotfit.frameworks.devices import VISIBLE, shown
from spotfit.host import env, frames
from spotfit.model.assessment import Assessment, Verdict
from spotfit.model.metrics import metrics_from_json, plain_json
from spotfit.policy.failure import while_preparing
from spotfit.ship.sign import RunKey
from spotfit.store.budget import PATIENT
from spotfit.store.opening import open_store
from spotfit.worker import crash
from spotfit.worker.luggage import move_in
from spotfit.worker.main import begin_logging, end

_assessments = decoder(Assessment)


def main(descriptor: int) -> NoReturn:
    """Validate for the agent at the other end of that socket. Ends the process."""
    faulthandler.enable()
    wire = socket.socket(fileno=descriptor)
    body = frames.read(wire)
    if body is None:
        os._exit(1)  # the agent is gone
    task = _assessments.decode(body)
    begin_logging(task.log_level)
    verdict = assess(task)
    if verdict.metrics is None:
        sys.stderr.write(f"{verdict.told}\n")
    frames.write(wire, encode(verdict))
    end(0, lambda: None)


def assess(task: Assessment) -> Verdict:
    """Everything between the task and its verdict."""
    try:
        fn, kwargs, checkpoint = _unpacked(task)
    except Exception as error:  # noqa: BLE001 - unpacking the user's function runs the user's code
        return Verdict(told=crash.told(error), again=not while_preparing(error).final)
    try:
        return Verdict(_plain(fn(checkpoint, **kwargs)))
    except BaseException as error:  # noqa: BLE001 - SystemExit in it is a failure, too
        return Verdict(told=crash.told(error))


def _unpacked(task: Assessment) -> tuple[Any, dict[str, Any], Checkpoint]:
    """The user's function, what it is called with, and the checkpoint."""
    store = open_store(task.storage_url, PATIENT)
    key = RunKey.from_text(task.secret, task.run_id)
    payload = move_in(task.luggage, key, store, task.scratch, task.run_name)
    cards = [device for device in task.devices if device.startswith("cuda:")]
    env.update(shown(cards, env.lookup(VISIBLE)))  # others are the workers' alone
    fn, usual = payload.load("validation")
    return fn, usual | metrics_from_json(task.kwargs), open_committed(store, task.checkpoint)


def _plain(told: Any) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise ConfigError(
            "The validation function must return a dictionary of metrics, not a "
            f"{type(told).__name__}.",
            do="Write return {'accuracy': accuracy}.",
        )
    return plain_json(told)
