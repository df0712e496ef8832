"""The program of a validator process: validates one checkpoint with the user's function, exits."""

from __future__ import annotations

import faulthandler
import os
import sys
from typing import Any, NoReturn

from spotfit.checkpoint.committed import open_committed
from spotfit.code import function_pickle
from spotfit.core.codec import decoder
from spotfit.core.errors import ConfigError
from spotfit.frameworks.devices import CUDA_VISIBLE_DEVICES, cuda_visible_devices
from spotfit.host import env
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.model.reporting import metrics_from_json, metrics_to_plain_json
from spotfit.policy.retry_budget import diagnose_setup_failure
from spotfit.protocol.agent_sidecar import ValidationResult, ValidationTask
from spotfit.security.run_key import RunKey
from spotfit.sidecar.process_setup import SidecarConnection
from spotfit.store.factory import open_store
from spotfit.store.retry import PATIENT_RETRY_POLICY
from spotfit.worker.code_setup import activate_code_bundle
from spotfit.worker.main import configure_logging, exit_process


def main(socket_fd: int) -> NoReturn:
    """Execute the one validation that the agent sends, send its result, and exit the process.

    `socket_fd`: the inherited end of a socket pair. Exits with code 1 if the agent is gone.
    """
    faulthandler.enable()
    connection = SidecarConnection(socket_fd, decoder(ValidationTask))
    task = connection.receive()
    if task is None:
        os._exit(1)  # the agent is gone
    configure_logging(task.log_level)
    result = validate_checkpoint(task)
    if result.metrics is None:  # also in this process's log, next to what the function has printed
        sys.stderr.write(f"{result.message}\n")
    connection.send(result)
    exit_process(0, lambda: None)


def validate_checkpoint(task: ValidationTask) -> ValidationResult:
    """Load the user's function and the checkpoint, call the function, and return its metrics.

    Never raises: a failure is returned as a message without metrics. `retryable` is set only if it
    happened before the function was called and may be temporary. Call it once per process: it
    changes environment variables, `sys.path` and the working directory.
    """
    try:  # separately: what fails before the user's function is called may be retried
        key = RunKey.from_text(task.secret, task.run_id)
        store = AuthenticatedStore(open_store(task.storage_url, PATIENT_RETRY_POLICY), key)
        payload = activate_code_bundle(
            task.code_bundle, key=key, store=store, scratch=task.scratch_dir, run_name=task.run_name
        )
        # Before unpickling the function: that may initialize CUDA, and workers use the other GPUs.
        gpus = [device for device in task.devices if device.startswith("cuda:")]
        env.update(cuda_visible_devices(gpus, env.lookup(CUDA_VISIBLE_DEVICES)))
        fn, trainer_kwargs = payload.load_object("validation")
        kwargs = trainer_kwargs | metrics_from_json(task.fn_kwargs)
        checkpoint = open_committed(store, task.checkpoint_name, digest=task.checkpoint_digest)
    except Exception as error:  # noqa: BLE001 - unpacking the user's function runs the user's code
        return ValidationResult(
            message=function_pickle.format_traceback(error),
            retryable=not diagnose_setup_failure(error).is_permanent,
        )
    try:
        return ValidationResult(metrics=_check_metrics(fn(checkpoint, **kwargs)))
    except BaseException as error:  # noqa: BLE001 - SystemExit is a failure, too
        return ValidationResult(message=function_pickle.format_traceback(error))


def _check_metrics(returned: Any) -> dict[str, Any]:
    if not isinstance(returned, dict):
        raise ConfigError(
            "The validation function must return a dictionary of metrics, not a "
            f"{type(returned).__name__}.",
            do="Return a dictionary, for example {'accuracy': 0.9}.",
        )
    return metrics_to_plain_json(returned)
