"""A simulated spot cloud for one test: machines to train on, and preemptions at chosen steps.

A planned preemption is a file beside the cloud. `SPOTFIT_CALLBACKS` adds `ReclaimCallback` to every
run of the test: the worker on the machine to preempt requests the preemption inside its own report,
and does no further step. Polling the reports from outside would be too late for a short training.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from spotfit.core.codec import encode
from spotfit.core.errors import ConfigError, SpotfitError
from spotfit.host import env
from spotfit.model.offer import Market
from spotfit.model.user_callback import UserCallback
from spotfit.worker.training_api import require_session
from spotfit_localsim.clouds.cloud_host import RECLAIMED, write_atomically
from spotfit_localsim.clouds.provisioner import SimProvisioner

SPOT_CLOUD_DIR_ENV = "SPOTFIT_SPOT_CLOUD"
"""Environment variable of a test: the directory of its spot cloud."""
# The worker must not continue before its machine is killed.
_RECLAIM_TIMEOUT_S = 20.0
# A notice of 2 s is enough for a save of a test's model, and keeps tests short.
_DEFAULT_OPTIONS: dict[str, Any] = {"boot_s": 0.1, "notice_s": 2.0}


class ReclaimPlan(msgspec.Struct, frozen=True):
    """Preempt the machine of `rank` when the run reports `step` or a later one."""

    step: int
    rank: int = 0
    notice: bool = True


class SpotCloud:
    """Machines that are processes of this computer, behind the API of a cloud.

    Pass `provisioner` and `storage_path` to a trainer to train there.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        """Keep all files below `folder`; `options` are those of `sim://` (cloud, seed, capacity,
        …)."""
        all_options = {**_DEFAULT_OPTIONS, **options, "root": str(folder / "cloud")}
        self.provider = SimProvisioner.with_options(**all_options)
        self.provisioner = f"sim://{self.provider.options.cloud}?" + urlencode(
            {name: value for name, value in all_options.items() if name != "cloud"}
        )
        self.storage_path = str(folder / "runs")
        self._folder = folder
        _plans_dir(folder).mkdir(parents=True, exist_ok=True)

    def environment(self) -> dict[str, str]:
        """Return the environment variables that the process that calls `fit()` needs."""
        # The user may have callbacks of the environment as well.
        callbacks = [name for name in (env.lookup(env.CALLBACKS.name),) if name]
        own_callback = f"{ReclaimCallback.__module__}.{ReclaimCallback.__qualname__}"
        return {
            SPOT_CLOUD_DIR_ENV: str(self._folder),
            env.PROVISIONER.name: self.provisioner,
            env.CALLBACKS.name: ",".join([*callbacks, own_callback]),
        }

    # --- preemptions and faults --------------------------------------------------------------

    def reclaim_at(self, step: int, *, rank: int = 0, notice: bool = True) -> None:
        """Preempt the machine of `rank` when the run reports `step` or a later one; once per call.

        The step is metrics["step"], or else the number of reports of this attempt. With `notice`
        the machine receives a preemption notice and is terminated `notice_s` later, or earlier when
        its replacement is ready; without it the machine is terminated at once. Raises `ConfigError`
        for a negative step or rank.
        """
        if step < 0 or rank < 0:
            raise ConfigError(f"reclaim_at(step={step}, rank={rank}): both must be at least 0.")
        # Files that are done count as well, so that numbers are not reused.
        number = len(list(_plans_dir(self._folder).iterdir()))
        write_atomically(
            _plans_dir(self._folder) / f"{number:04d}.json", encode(ReclaimPlan(step, rank, notice))
        )

    def reclaim(self, *, machine: int | None = None, notice: bool = True) -> None:
        """Preempt a spot machine now: the one with that number, or the youngest running one."""
        self.provider.call_simulator("reclaim", {"machine": machine, "notice": notice})

    def set_capacity(self, machines: int | None) -> None:
        """Limit the number of spot machines from now on; None for no limit.

        The youngest ones beyond the limit are preempted.
        """
        self.provider.call_simulator("capacity", {"machines": machines})

    def set_on_demand_capacity(self, machines: int | None) -> None:
        """Refuse on-demand machines beyond this number from now on; None for no limit.

        Machines that run already are not affected.
        """
        arguments = {"machines": machines, "market": Market.ON_DEMAND.value}
        self.provider.call_simulator("capacity", arguments)

    def fail_requests(
        self, kind: str, *, times: int | None = None, duration_s: float = 0.0
    ) -> None:
        """Fail the next `times` requests to the cloud, and all requests for `duration_s`.

        `kind` is 'quota', 'permission', 'credentials', 'capacity', 'throttled' or 'unavailable'.
        Without `times`, one request fails, or none besides those within `duration_s`.
        """
        number = (0 if duration_s else 1) if times is None else times
        arguments = {"kind": kind, "times": number, "duration_s": duration_s}
        self.provider.call_simulator("trouble", arguments)

    # --- state -------------------------------------------------------------------------------

    def machines(self) -> list[dict[str, Any]]:
        """Return every machine so far, oldest first, with its 'state', 'market' and times."""
        machines: list[dict[str, Any]] = self.provider.call_simulator("machines")
        return machines

    @property
    def reclaimed_count(self) -> int:
        """The number of machines that were preempted or received a notice."""
        machines = self.machines()
        return sum(
            machine["end_reason"] == RECLAIMED or machine["noticed_at_s"] is not None
            for machine in machines
        )

    @property
    def billed_machine_count(self) -> int:
        """The number of machines that are not terminated."""
        return sum(machine["state"] != "over" for machine in self.machines())

    def unreached_plans(self) -> list[ReclaimPlan]:
        """Return the plans whose step no run has reported."""
        paths = sorted(_plans_dir(self._folder).glob("*.json"))
        return [msgspec.json.decode(path.read_bytes(), type=ReclaimPlan) for path in paths]

    def close(self) -> None:
        """Terminate all machines and the simulator."""
        self.provider.call_simulator("leave", {"machines": True})


class ReclaimCallback(UserCallback):
    """Triggers planned preemptions from within the worker on the machine to preempt."""

    def __init__(self) -> None:
        """Called in the process of `fit()`; the pickled object is used by the workers."""
        self._folder = Path(env.lookup(SPOT_CLOUD_DIR_ENV) or "")

    @contextmanager
    def train_func_context(self) -> Iterator[None]:
        """Wrap the report methods of the session while the training function runs."""
        session: Any = require_session("reclaim_at")
        reports = itertools.count(1)
        session.report_metrics = self._wrap_report(session.report_metrics, reports)
        session.report_checkpoint = self._wrap_report(session.report_checkpoint, reports)
        yield

    def _wrap_report(
        self, report: Callable[..., None], reports: Iterator[int]
    ) -> Callable[..., None]:
        def reporting(metrics: dict[str, Any], *arguments: Any) -> None:
            report(metrics, *arguments)
            # After the report: the step of the plan is the last one that the run knows of.
            step = metrics.get("step", next(reports))
            rank = require_session("reclaim_at").context.get_world_rank()
            for path in sorted(_plans_dir(self._folder).glob("*.json")):
                plan = msgspec.json.decode(path.read_bytes(), type=ReclaimPlan)
                if plan.rank == rank and step >= plan.step:
                    # Renamed before it is carried out: a restarted worker must not repeat the plan.
                    path.rename(path.with_suffix(".done"))
                    self._reclaim_own_machine(plan)

        return reporting

    def _reclaim_own_machine(self, plan: ReclaimPlan) -> None:
        session: Any = require_session("reclaim_at")
        sim = SimProvisioner.with_options(
            **msgspec.json.decode((self._folder / "cloud" / "options.json").read_bytes())
        )
        host = session.host
        # The machine of this worker has the address under which its agent is known.
        own_machines = [
            m for m in sim.call_simulator("machines") if m["state"] == "up" and m["address"] == host
        ]
        sim.call_simulator("reclaim", {"machine": own_machines[0]["number"], "notice": plan.notice})
        # Block until the run knows of the notice, or until this process is killed: another step
        # would make the tested step depend on timing.
        if plan.notice and session.wait_for_preemption(_RECLAIM_TIMEOUT_S):
            return
        threading.Event().wait(_RECLAIM_TIMEOUT_S)
        raise SpotfitError(f"The machine of rank {plan.rank} was preempted but is still running.")


def _plans_dir(folder: Path) -> Path:
    return folder / "plans"
