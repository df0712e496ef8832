"""Messages between an agent and its five sidecar processes.

| sidecar   | runs on       | agent -> sidecar                  | sidecar -> agent              |
|-----------|---------------|-----------------------------------|-------------------------------|
| callbacks | leader's node | `SidecarInit`, `ToCallbackRunner` | `CallbackFinished`            |
| hooks     | leader's node | `SidecarInit`, `ToHookRunner`     | `CallWorkers`, `HookFinished` |
| uploader  | every node    | `StartUpload`                     | `UploadDone` or `UploadError` |
| validator | assigned node | `ValidationTask`                  | `ValidationResult`            |
| feeder    | feeder nodes  | `SidecarInit`, `StartFeeders`     | `FeedersListening`            |

`SidecarInit` and `ValidationTask` contain the run key; their `repr` omits it, so that it cannot
reach a log.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from spotfit.core.ids import RunId
from spotfit.model.topology import FeederAddress
from spotfit.protocol.worker_agent import Payload

# --- validator ---------------------------------------------------------------------------------


class ValidationTask(msgspec.Struct, frozen=True, kw_only=True):
    """The only frame that a validator process receives: what to validate, and how."""

    storage_url: str
    """The root of the run in the bucket."""
    code_bundle: dict[str, Any]
    """A `CodeBundleRef` as plain JSON."""
    # Sent over the socket: arguments and environment variables are visible to other processes.
    secret: str
    """The run key as text."""
    run_id: RunId
    checkpoint_name: str
    checkpoint_digest: str = ""
    """Its `CheckpointCommitted.manifests_digest`."""
    fn_kwargs: dict[str, Any] = {}
    """Keyword arguments of this validation; they override those of the trainer's config."""
    devices: tuple[str, ...] = ()
    """The accelerators that the process may use."""
    scratch_dir: str = ""
    run_name: str = ""
    log_level: str = "INFO"

    def __repr__(self) -> str:
        return f"ValidationTask({self.checkpoint_name!r} of {self.storage_url!r})"


class ValidationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of a validation, or the reason why there are none."""

    metrics: dict[str, Any] | None = None
    message: str = ""
    """The traceback or the reason of the failure, if `metrics` is None."""
    retryable: bool = False
    """Whether the user's function was not called, for a reason that may be temporary."""


# --- callbacks ---------------------------------------------------------------------------------


class SidecarInit(msgspec.Struct, frozen=True, kw_only=True, tag="sidecar_init"):
    """The first frame to a callbacks, hooks or feeder process: where to load the user's code
    from."""

    storage_url: str
    """The root of the run in the bucket."""
    code_bundle: dict[str, Any]
    """A `CodeBundleRef` as plain JSON."""
    secret: str
    """The run key as text."""
    run_id: RunId
    scratch_dir: str = ""

    def __repr__(self) -> str:
        return f"SidecarInit({self.storage_url!r})"


class CallAfterReport(msgspec.Struct, frozen=True, kw_only=True, tag="call_after_report"):
    """Call `after_report` with a report of all ranks."""

    metrics_by_rank: tuple[msgspec.Raw, ...]
    checkpoint_name: str | None = None
    """The committed checkpoint of the report, if it has one."""
    checkpoint_digest: str = ""
    """Its `CheckpointCommitted.manifests_digest`."""


class RankFailureSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of one rank."""

    rank: int
    message: str
    pickle_key: str | None = None
    """The bucket key of the sealed, pickled exception; None if it could not be pickled."""


class CallAfterException(msgspec.Struct, frozen=True, kw_only=True, tag="call_after_exception"):
    """Call `after_exception`: a round failed on these ranks."""

    failures: tuple[RankFailureSummary, ...]


ToCallbackRunner = SidecarInit | CallAfterReport | CallAfterException


# Without a tag: it is the only message of its process, like `ValidationResult`.
class CallbackFinished(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to each `CallAfterReport` and `CallAfterException`, in order."""

    traceback_text: str | None = None
    """The traceback, if a callback raised."""
    pickle_key: str | None = None
    """The bucket key of the sealed, pickled exception; None if it could not be pickled."""


# --- backend hooks: agent -> process -------------------------------------------------------------

BackendHook = Literal["on_start", "on_training_start", "on_shutdown"]


class RunHook(msgspec.Struct, frozen=True, kw_only=True, tag="run_hook"):
    """Call a hook of the backend for a round. The replies are `HookFinished`, in order."""

    hook: BackendHook
    round: int
    world_size: int
    resources_per_worker: dict[str, float] = {}
    """Resource name to amount, from the scaling config."""


class WorkerCallResult(msgspec.Struct, frozen=True, kw_only=True, tag="worker_call_result"):
    """The result of a `CallWorkers` from one rank."""

    round: int
    rank: int
    call_id: int
    pickled_value: bytes
    """The pickled return value or exception; empty if the exception cannot be pickled."""
    traceback_text: str | None = None
    """The traceback, if the call raised."""


class WorkersUnavailable(msgspec.Struct, frozen=True, kw_only=True, tag="workers_unavailable"):
    """The workers of a round have ended: its pending calls will not be answered."""

    round: int


ToHookRunner = SidecarInit | RunHook | WorkerCallResult | WorkersUnavailable

# --- backend hooks: process -> agent -------------------------------------------------------------


class CallWorkers(msgspec.Struct, frozen=True, kw_only=True, tag="call_workers"):
    """Execute a pickled call on workers of a round. Each rank replies with `WorkerCallResult`."""

    # A call of a round that has ended raises `StaleWorkerGroupError` in the hook.
    round: int
    call_id: int
    ranks: tuple[int, ...]
    pickled_call: Payload


class HookFinished(msgspec.Struct, frozen=True, kw_only=True, tag="hook_finished"):
    """A hook returned or raised."""

    hook: BackendHook
    round: int
    traceback_text: str | None = None
    """The traceback, if the hook raised."""
    pickle_key: str | None = None
    """The bucket key of the sealed, pickled exception; None if it could not be pickled."""


FromHookRunner = CallWorkers | HookFinished

# --- feeder --------------------------------------------------------------------------------------


class StartFeeders(msgspec.Struct, frozen=True, kw_only=True, tag="start_feeders"):
    """Start the feeder processes of this node, and accept connections of workers."""

    processes: int
    log_level: str = "INFO"


ToFeederNode = SidecarInit | StartFeeders


# Without a tag: it is the only message of its process, like `ValidationResult`.
class FeedersListening(msgspec.Struct, frozen=True, kw_only=True):
    """The feeders accept connections."""

    feeder: FeederAddress


# --- uploader ------------------------------------------------------------------------------------


class StartUpload(msgspec.Struct, frozen=True, kw_only=True, tag="start_upload"):
    """Execute an upload job. The jobs of one rank are executed in the order of their arrival."""

    job_id: int
    """Chosen by the agent; the reply repeats it."""
    rank: int
    storage_url: str
    """The root of the run in the bucket."""
    secret: str
    """The run key as text, which authenticates the manifests."""
    run_id: RunId
    # A pickle: the uploader unpickles it, the agent that forwards it never does.
    upload_job: bytes


class UploadDone(msgspec.Struct, frozen=True, kw_only=True, tag="upload_done"):
    """The files and their manifest are in the bucket."""

    job_id: int
    size_bytes: int
    step: int | None = None
    """For a snapshot, the number of training steps it contains."""
    manifest_digest: str = ""
    """`checkpoint.manifest.manifest_digest` of the manifest."""


class UploadError(msgspec.Struct, frozen=True, kw_only=True, tag="upload_error"):
    """The upload failed."""

    job_id: int
    traceback_text: str
    pickled_exception: bytes = b""
    """Empty if the exception cannot be pickled."""


FromUploader = UploadDone | UploadError
