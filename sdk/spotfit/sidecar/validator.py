"""The agent's side of a validator process, which validates one checkpoint."""

from __future__ import annotations

from spotfit.core.codec import decoder
from spotfit.core.ids import RunId
from spotfit.model.events import CheckpointCommitted, ValidationRequest
from spotfit.model.spec import RunSpec
from spotfit.protocol.agent_fork_server import EXIT_FORK_SERVER_DIED, EXIT_NOT_STARTED
from spotfit.protocol.agent_sidecar import ValidationResult, ValidationTask
from spotfit.sidecar.channel import SidecarChannel, StartSidecarFn


class ProcessValidator:
    """The `Validator` that uses a process; a new one for each checkpoint.

    Args:
        secret: The run key as text.
        scratch: The scratch directory of this node.
        devices: All accelerators of this node.
    """

    def __init__(
        self,
        start_process: StartSidecarFn,
        *,
        secret: str,
        run_id: RunId,
        scratch: str,
        devices: tuple[str, ...],
    ) -> None:
        self._received_results: list[ValidationResult] = []
        """Sent by the process (one), which still holds its accelerators until it exits."""
        self._final_result: ValidationResult | None = None
        self._channel = SidecarChannel(
            start_process,
            decoder=decoder(ValidationResult),
            on_message=self._received_results.append,
            on_exit=self._on_exit,
        )
        self._secret = secret
        self._run_id = run_id
        self._scratch = scratch
        self._devices = devices
        self._is_stopped = False

    def start(self, spec: RunSpec, checkpoint: CheckpointCommitted) -> None:
        self._is_stopped, self._final_result = False, None
        self._received_results.clear()
        request = checkpoint.validation or ValidationRequest()
        gpus = spec.validation.resources.get("GPU", 0) if spec.validation else 0
        self._channel.send(
            ValidationTask(
                storage_url=spec.storage_url,
                code_bundle=spec.code_bundle,
                secret=self._secret,
                run_id=self._run_id,
                checkpoint_name=checkpoint.name,
                checkpoint_digest=checkpoint.manifests_digest,
                fn_kwargs=request.fn_kwargs or {},
                # At least one accelerator if the resources request any, a fraction for example.
                devices=self._devices[: max(1, int(gpus))] if gpus > 0 else (),
                scratch_dir=self._scratch,
                run_name=spec.name,
                log_level=spec.log_level,
            )
        )

    def stop(self) -> None:
        # Killed, not closed: `is_running` stays true until its accelerators are free.
        self._is_stopped, self._final_result = True, None
        self._channel.kill()

    @property
    def is_running(self) -> bool:
        return self._channel.is_started

    def take_result(self) -> ValidationResult | None:
        result, self._final_result = self._final_result, None
        return result

    def _on_exit(self, reason: str) -> None:
        self._channel.forget()  # so that the next checkpoint starts another process
        if not self._is_stopped:
            # Neither the user's function nor the checkpoint is to blame for these: try again.
            retryable = reason.startswith((EXIT_FORK_SERVER_DIED, EXIT_NOT_STARTED))
            died = ValidationResult(
                message=f"The validation process {reason}.", retryable=retryable
            )
            self._final_result = (self._received_results or [died])[-1]
