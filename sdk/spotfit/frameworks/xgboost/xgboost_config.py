"""XGBoostConfig and its framework: XGBoost's collective communicator over all ranks of a round.

Rank 0 runs XGBoost's tracker, which chooses a new port in every round: no rank can connect to the
tracker of an earlier round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import suggest_keywords
from spotfit.frameworks.backend_config import Backend, BackendConfig
from spotfit.frameworks.framework import AllGatherFn, rank_environment
from spotfit.host import log
from spotfit.host.plugins import require_module
from spotfit.model.config import ScalingConfig
from spotfit.protocol.worker_agent import StartWorker

if TYPE_CHECKING:
    from xgboost.tracker import RabitTracker

_COMMUNICATOR = "rabit"
# The other ranks finalize within milliseconds of each other: all functions have returned.
_TRACKER_SHUTDOWN_TIMEOUT_S = 5


@suggest_keywords
@dataclass
class XGBoostConfig(BackendConfig):
    """Configuration of XGBoost's communicator; "rabit" is the only one."""

    xgboost_communicator: str = _COMMUNICATOR

    @property
    def backend_cls(self) -> type[Backend]:
        """The base class, which has no hooks: the workers form the communicator.

        Raises `ConfigError` for another communicator than "rabit".
        """
        self._check_communicator()
        return Backend

    @property
    def framework(self) -> str:
        """The name under which workers look up the framework: "xgboost"."""
        return "xgboost"

    def framework_options(self, scaling: ScalingConfig) -> tuple[str, dict[str, Any]]:
        """Return the framework's name and its options, which are none.

        Raises `ConfigError` for another communicator than "rabit".
        """
        self._check_communicator()
        return self.framework, {}

    def _check_communicator(self) -> None:
        if self.xgboost_communicator != _COMMUNICATOR:
            raise ConfigError(
                f"XGBoostConfig(xgboost_communicator={self.xgboost_communicator!r}) is not "
                "supported: the only communicator is 'rabit'.",
                do="Omit xgboost_communicator.",
            )


class XGBoostFramework:
    """Framework for XGBoost: forms its communicator, in which xgboost.train runs distributed.

    The communicator belongs to the main thread, which calls the training function.
    """

    preload_modules: tuple[str, ...] = (
        "numpy",
        "xgboost",
        "xgboost.tracker",
        "spotfit.xgboost.segmented_xgboost",
    )
    # "device": "cuda" is the first visible GPU: each worker must see its own only.
    sees_peer_devices = False
    leaves_together = False

    def __init__(self) -> None:
        self._tracker: RabitTracker | None = None
        self._has_group = False

    def environment(self, start: StartWorker) -> dict[str, str]:
        """Return torchrun's rank variables and the visible devices, for the worker to set.

        Raises `ConfigError` if the node has too few devices; see `rank_environment`.
        """
        return rank_environment(start, sees_peer_devices=self.sees_peer_devices)

    def form_group(self, start: StartWorker, all_gather: AllGatherFn) -> None:
        """Start the tracker on rank 0 and join the communicator; XGBoost's rank is the world rank.

        Blocks until all ranks have joined. A single worker needs neither. Raises
        `MissingExtraError` without xgboost, XGBoostError and the exceptions of `all_gather`.
        """
        require_module("xgboost", extra="xgboost")
        from xgboost import collective

        if start.world_size == 1:
            return
        arguments: Mapping[str, Any] = {}
        if start.rank == 0:
            arguments = self._start_tracker(start)
        values = all_gather("xgboost_tracker", msgspec.json.encode(arguments))
        arguments = msgspec.json.decode(values[0])
        # The tracker sorts the task ids as text.
        collective.init(**arguments, dmlc_task_id=f"{start.rank:08d}")
        self._has_group = True

    def leave_group(self) -> None:
        """Leave the communicator; rank 0 then waits until the others have left, 5 s at most.

        A no-op if there is none.
        """
        if not self._has_group:
            return
        from xgboost import collective
        from xgboost.core import XGBoostError

        self._has_group = False
        try:
            collective.finalize()
            if self._tracker is not None:
                self._tracker.wait_for(_TRACKER_SHUTDOWN_TIMEOUT_S)
        except (ValueError, XGBoostError) as error:
            log.warning("xgboost.leave_group.failed", reason=str(error).strip().splitlines()[-1])

    def _start_tracker(self, start: StartWorker) -> Mapping[str, Any]:
        from xgboost.tracker import RabitTracker

        tracker = RabitTracker(start.world_size, start.host, sortby="task")
        tracker.start()
        # Kept: the tracker ends with this object.
        self._tracker = tracker
        arguments: Mapping[str, Any] = tracker.worker_args()
        return arguments
