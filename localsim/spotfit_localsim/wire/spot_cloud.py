"""A simulated cloud for one test of a user's: machines to train on, and plans to take them away.

A plan lies as a file beside the cloud. A callback that every run of the test gets (by
SPOTFIT_CALLBACKS) surrounds the training function: the worker whose machine is to go has the cloud
take it at the report itself, and makes no step more. Watched from outside, a small training would
be over before anybody had looked.
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
from spotfit.model.callbacks import UserCallback
from spotfit.worker.current import current
from spotfit_localsim.wire.provisioner import SimProvisioner
from spotfit_localsim.wire.site import RECLAIMED, write

FOLDER = "SPOTFIT_SPOT_CLOUD"
"""In the environment of a test: where its cloud lies."""
_PATIENCE_S = 20.0
_QUICK: dict[str, Any] = {"boot_s": 0.1, "notice_s": 2.0}


class Plan(msgspec.Struct, frozen=True):
    """The machine of a rank is to be taken away, once the run has reported that step."""

    step: int
    rank: int = 0
    notice: bool = True


class SpotCloud:
    """Machines that are processes of this computer, behind the API of a cloud.

    `provisioner` and `storage_path` are what a trainer needs to train there.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        """Below `folder`. `options` are those of `sim://`: cloud, seed, capacity, notice_s, …"""
        told = {**_QUICK, **options, "root": str(folder / "cloud")}
        self.sim = SimProvisioner.with_options(**told)
        self.provisioner = f"sim://{self.sim.options.cloud}?" + urlencode(
            {name: value for name, value in told.items() if name != "cloud"}
        )
        self.storage_path = str(folder / "runs")
        self._folder = folder
        _plans(folder).mkdir(parents=True, exist_ok=True)

    def environment(self) -> dict[str, str]:
        """What has to stand in the environment of whoever calls `fit()`."""
        others = [one for one in (env.lookup(env.CALLBACKS.name),) if one]
        mine = f"{Striker.__module__}.{Striker.__qualname__}"
        return {
            FOLDER: str(self._folder),
            env.PROVISIONER.name: self.provisioner,
            env.CALLBACKS.name: ",".join([*others, mine]),
        }

    # --- what the market does ----------------------------------------------------------------

    def reclaim_at(self, step: int, *, rank: int = 0, notice: bool = True) -> None:
        """Take the machine of that rank away when the run reports that step, or a later one.

        The step is metrics["step"]; where none is reported, the number of this attempt's reports.
        With `notice` the machine is told, and goes `notice_s` later, or when another one has taken
        its place. Each plan is carried out once.
        """
        if step < 0 or rank < 0:
            raise ConfigError(f"There is no step {step} of rank {rank}: both begin at 0.")
        number = len(list(_plans(self._folder).iterdir()))
        write(_plans(self._folder) / f"{number:04d}.json", encode(Plan(step, rank, notice)))

    def reclaim(self, *, machine: int | None = None, notice: bool = True) -> None:
        """Take a machine away now: the one with that number, or the youngest that is up."""
        self.sim.ask("reclaim", {"machine": machine, "notice": notice})

    def limit(self, machines: int | None) -> None:
        """How many machines there are from now on; None: as many as anybody wants."""
        self.sim.ask("capacity", {"machines": machines})

    def refuse(self, kind: str, *, times: int = 1) -> None:
        """Answer so many of the next requests with that trouble.

        One of 'quota', 'permission', 'credentials', 'capacity', 'throttled', 'unavailable'.
        """
        self.sim.ask("trouble", {"kind": kind, "times": times})

    # --- what has happened -------------------------------------------------------------------

    def machines(self) -> list[dict[str, Any]]:
        """Every machine there ever was, oldest first, with its 'state', 'why' and times."""
        machines: list[dict[str, Any]] = self.sim.ask("machines")
        return machines

    @property
    def reclaimed(self) -> int:
        """How many machines the market has taken back, or told that it will."""
        machines = self.machines()
        return sum(one["why"] == RECLAIMED or one["notice_s"] is not None for one in machines)

    @property
    def paid_for(self) -> int:
        """How many machines stand there, whether somebody uses them or not."""
        return sum(one["state"] != "over" for one in self.machines())

    def unreached(self) -> list[Plan]:
        """Plans whose step no run has reported."""
        left = sorted(_plans(self._folder).glob("*.json"))
        return [msgspec.json.decode(path.read_bytes(), type=Plan) for path in left]

    def close(self) -> None:
        """End every machine, and the cloud."""
        self.sim.ask("leave", {"machines": True})


class Striker(UserCallback):
    """Carries the plans out, from within the worker whose machine is to go."""

    def __init__(self) -> None:
        """Made where `fit()` is called; copies of it work on the workers."""
        self._folder = Path(env.lookup(FOLDER) or "")

    @contextmanager
    def train_func_context(self) -> Iterator[None]:
        """While it lasts, every report of this rank may be its machine's last."""
        session: Any = current("reclaim_at")
        reports = itertools.count(1)
        session.report_metrics = self._striking(session.report_metrics, reports)
        session.report_files = self._striking(session.report_files, reports)
        yield

    def _striking(self, report: Callable[..., None], reports: Iterator[int]) -> Callable[..., None]:
        def reporting(metrics: dict[str, Any], *arguments: Any) -> None:
            report(metrics, *arguments)
            count = next(reports)
            self._strike(metrics.get("step", count))

        return reporting

    def _strike(self, step: int) -> None:
        rank = current("reclaim_at").context.get_world_rank()
        for path in sorted(_plans(self._folder).glob("*.json")):
            plan = msgspec.json.decode(path.read_bytes(), type=Plan)
            if plan.rank == rank and step >= plan.step:
                path.rename(path.with_suffix(".done"))
                self._carry_out(plan)

    def _carry_out(self, plan: Plan) -> None:
        session: Any = current("reclaim_at")
        sim = SimProvisioner.with_options(
            **msgspec.json.decode((self._folder / "cloud" / "options.json").read_bytes())
        )
        here = session.host
        mine = [m for m in sim.ask("machines") if m["state"] == "up" and m["address"] == here]
        sim.ask("reclaim", {"machine": mine[0]["number"], "notice": plan.notice})
        # Not one step more until the run knows that this machine will go, or until it is gone.
        if plan.notice and session.wait_for_notice(_PATIENCE_S):
            return
        threading.Event().wait(_PATIENCE_S)
        raise SpotfitError(f"The machine of rank {plan.rank} was reclaimed, and is still there.")


def _plans(folder: Path) -> Path:
    return folder / "plans"
