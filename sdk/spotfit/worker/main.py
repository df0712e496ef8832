"""The main program of a worker process.

| state         | event                               | next          |
|---------------|-------------------------------------|---------------|
| connected     | `StartWorker` received              | code setup    |
| code setup    | user code loaded                    | gate "setup"  |
| code setup    | exception: `WorkerRaised` with cause| exit 1        |
| gate "setup"  | `OpenGate`, or no backend hooks     | group setup   |
| group setup   | process group formed                | gate "train"  |
| gate "train"  | `OpenGate`, or no backend hooks     | training      |
| training      | function returned, uploads complete | peers or save |
| peers         | all ranks joined (`leaves_together`)| save at end   |
| save at end   | snapshot submitted, or none         | gate "leave"  |
| gate "leave"  | `OpenGate`, or no backend hooks     | exit 0        |
| any but setup | exception: `WorkerRaised`           | exit 1        |
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from spotfit.checkpoint.snapshot_channel import run_save_at_end
from spotfit.code import function_pickle
from spotfit.code.code_bundle import DATASETS, CodeBundlePayload, LoadedFunction
from spotfit.core.errors import ConfigError, ShippingError
from spotfit.core.ids import RunId
from spotfit.core.units import format_bytes
from spotfit.frameworks.devices import worker_devices
from spotfit.frameworks.framework import Framework
from spotfit.frameworks.registry import open_framework
from spotfit.host import env, log
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.protocol.worker_agent import (
    LEAVE_GROUP,
    FunctionStarted,
    StartWorker,
    WorkerReturned,
)
from spotfit.security.run_key import RunKey
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.store.retry import PATIENT_RETRY_POLICY
from spotfit.worker import agent_connection, training_api
from spotfit.worker.agent_connection import AgentConnection
from spotfit.worker.code_setup import activate_code_bundle
from spotfit.worker.session import Session

# Exit handlers of libraries (wandb, loggers) flush over the network; a hanging one must not keep
# the node's next round waiting.
_EXIT_TIMEOUT_S = 10.0
_SHUTDOWN_TIMEOUTS = (env.PROCESS_GROUP_SHUTDOWN_TIMEOUT_S, env.JAX_SHUTDOWN_TIMEOUT_S)
# Ranks reach the group's formation at different times: some nodes still install requirements.
_GROUP_INIT_TIMEOUT_S = 300.0
_LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"
# As base64 in JSON it stays below `framing.MAX_FRAME_BYTES`.
_MAX_RESULT_BYTES = 32 * 2**20


def main(socket_fd: int) -> NoReturn:
    """Run one worker process for the agent at the other end of the socket, then exit the process.

    `socket_fd` is the file descriptor of a connected Unix socket; its first message must be
    `StartWorker`. Exits with 0 after success and 1 after an error, which is sent to the agent.
    """
    faulthandler.enable()  # a segmentation fault prints the Python stacks to the worker's log
    connection = AgentConnection(socket.socket(fileno=socket_fd))
    # The run key arrives in this message: argv and the environment are visible to other processes.
    start = connection.receive(None)
    assert isinstance(start, StartWorker), "the first message is StartWorker"
    configure_logging(start.log_level)
    if start.heartbeat_interval_s:
        agent_connection.start_heartbeat(
            connection,
            interval_s=start.heartbeat_interval_s,
            stacks_dir=Path(start.scratch_dir) / "stacks",
        )
    # After the heartbeat has started: a framework from an entry point may import large libraries.
    framework = open_framework(start.framework)
    exit_process(_run(start, connection, framework), framework.leave_group)


def configure_logging(level: str) -> None:
    """Set spotfit's log level, such as "INFO", and print the user's log records to stderr.

    Loggers of user code print INFO and above, unless the root logger has handlers already.
    """
    log.set_level(level)
    # Without a handler, logging.info() in user code would print nothing.
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_is_not_printed_yet)
    logging.basicConfig(level=logging.INFO, handlers=[handler], format=_LOG_FORMAT)


def _is_not_printed_yet(record: logging.LogRecord) -> bool:
    """Whether no logger below the root prints the record, as some libraries' loggers do."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None and logger is not logging.root:
        for handler in logger.handlers:
            # Not its subclasses, such as a FileHandler.
            if type(handler) is logging.StreamHandler and record.levelno >= handler.level:
                return False
        logger = logger.parent
    return True


def _run(start: StartWorker, connection: AgentConnection, framework: Framework) -> int:
    """Set up, train and report the outcome; return the exit code."""
    try:
        key = RunKey.from_text(start.secret, RunId(start.run_id))
        store = AuthenticatedStore(open_store(start.storage_url, PATIENT_RETRY_POLICY), key)
        payload = load_code_bundle(start, store, framework)
        function = payload.load_function()
    except BaseException as error:  # noqa: BLE001 - importing the user's modules may raise anything
        print_traceback(error)
        connection.send(function_pickle.to_setup_failure_message(error))
        return 1
    try:
        devices = worker_devices(start, sees_peer_devices=framework.sees_peer_devices)
        session = Session(
            start,
            connection,
            store,
            devices=devices,
            pickled_datasets=payload.object_pickles.get(DATASETS, b""),
        )
        training_api.set_session(session)
        value = _train(
            start, session, connection=connection, framework=framework, function=function
        )
        # Only the value of rank 0 is a part of the result.
        pickled_value = _pickle_result(value) if start.rank == 0 else b""
        connection.send(
            WorkerReturned(
                report_count=session.report_count,
                pickled_value=pickled_value,
                save_at_end=run_save_at_end(session.snapshot_channel),
            )
        )
        # on_shutdown may still call functions on this worker.
        session.hook_calls.wait_for_phase("leave")
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are failures, too
        print_traceback(error)
        connection.send(function_pickle.to_failure_message(error))
        return 1
    return 0


def _train(
    start: StartWorker,
    session: Session,
    *,
    connection: AgentConnection,
    framework: Framework,
    function: LoadedFunction,
) -> Any:
    """Form the process group and call the training function, with a gate before each."""
    session.hook_calls.wait_for_phase("setup")
    framework.form_group(
        start,
        lambda kind, value: session.all_gather_bytes(kind, value, timeout_s=_GROUP_INIT_TIMEOUT_S),
    )
    # on_training_start runs at this gate, with the process group formed.
    session.hook_calls.wait_for_phase("train")
    session.hook_calls.serve_in_background()
    connection.send(FunctionStarted())
    try:
        value = function.call()
    except StopIteration as error:
        if (cause := session.data_end_error()) is not None:
            raise cause from error
        raise
    # Before the result is sent: a round that has returned is over, and its checkpoints are final.
    session.wait_for_uploads()
    if framework.leaves_together and start.world_size > 1:
        session.all_gather_bytes(LEAVE_GROUP, b"")
    return value


def print_traceback(error: BaseException) -> None:
    """Print the whole traceback to this process's log. Never raises if standard error is closed.

    Called before the agent learns of the failure, because it kills this process when the round is
    closed. The error that `fit()` raises contains a shortened text.
    """
    with suppress(OSError, ValueError, AttributeError):  # user code may have replaced sys.stderr
        traceback.print_exception(error)
        sys.stderr.flush()


def load_code_bundle(start: StartWorker, store: Store, framework: Framework) -> CodeBundlePayload:
    """Open the code bundle, with its code importable and its environment variables set.

    Changes `os.environ`, `sys.path` and the working directory of this worker process. Raises the
    errors of `activate_code_bundle`.
    """
    key = RunKey.from_text(start.secret, RunId(start.run_id))
    payload = activate_code_bundle(
        start.code_bundle, key=key, store=store, scratch=start.scratch_dir, run_name=start.run_name
    )
    # Before unpickling: that may import a module which initializes CUDA, and CUDA reads
    # CUDA_VISIBLE_DEVICES only once.
    env.update(framework.environment(start))
    return payload


# --- the return value ----------------------------------------------------------------------------


class _ReturnPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Rejects tensors: the caller's machine may have neither torch nor the device."""

    def reducer_override(self, obj: Any) -> Any:
        # Not imported: without torch in this process the value cannot hold a tensor.
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            raise _TensorFound
        return function_pickle.dataclass_sentinel_name(obj) or super().reducer_override(obj)


class _TensorFound(Exception):  # noqa: N818 - control flow between two functions of this module
    pass


def _pickle_result(value: Any) -> bytes:
    sink = BytesIO()
    try:
        _ReturnPickler(sink).dump(value)
    except _TensorFound as tensor:
        raise ConfigError(  # a ValueError, as in Ray Train
            "The training function returned a value that holds torch tensors.",
            do="Return numbers or NumPy arrays (tensor.item(), tensor.numpy()), and save weights "
            "in a checkpoint.",
        ) from tensor
    except (pickle.PicklingError, TypeError, AttributeError) as refused:
        raise ShippingError(
            f"The return value of the training function, a {type(value).__name__}, cannot be "
            f"pickled: {refused}",
            do="Return numbers, strings or lists; report metrics with report() and save files in "
            "a checkpoint.",
        ) from refused
    if sink.tell() > _MAX_RESULT_BYTES:
        raise ShippingError(
            f"The return value of the training function has {format_bytes(sink.tell())}; the limit "
            f"is {format_bytes(_MAX_RESULT_BYTES)}.",
            do="Return small values, and save large ones in a checkpoint.",
        )
    return sink.getvalue()


# --- process exit --------------------------------------------------------------------------------


def exit_process(exit_code: int, leave_group: Callable[[], None]) -> NoReturn:
    """Leave the process group, run exit handlers and exit this process with `exit_code`.

    For workers and validators. `leave_group` is called only for exit code 0, because it waits for
    the peers. If any of this hangs, a timer exits after 10 s plus the time that the process group
    has to shut down.
    """
    shutdown_timeout_s = max(map(env.read, _SHUTDOWN_TIMEOUTS))
    # A timer thread, because a destructor of a framework may hang while it holds no Python lock.
    watchdog = threading.Timer(_EXIT_TIMEOUT_S + shutdown_timeout_s, os._exit, (exit_code,))
    watchdog.daemon = True
    watchdog.start()
    try:
        if exit_code == 0:
            # Not after a failure: destroying the group waits for peers that may be inside a
            # collective with this rank. The agent kills all of them.
            leave_group()
        # Not sys.exit(): that joins non-daemon threads of the user's code first, which may hang.
        atexit._run_exitfuncs()  # noqa: SLF001 - as multiprocessing does in its children
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        faulthandler.disable()
        os._exit(exit_code)
