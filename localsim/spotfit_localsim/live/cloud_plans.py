"""Random plans of chaos runs on simulated clouds: everything that a seed decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

import msgspec
from msgspec.structs import replace

from spotfit_localsim.clouds.injected_errors import ApiFaultKind
from spotfit_localsim.live import network_faults
from spotfit_localsim.random_streams import RandomStream, SeededStreams

CloudName = Literal["aws_batch", "gcp_batch", "azure_batch", "kubernetes"]
Firewall = Literal["", "machines", "storage"]
FaultOrigin = Literal["start", "round"]
"""From when the time of a fault counts: the start of the driver, or the first round."""

_CLOUDS: list[CloudName] = ["aws_batch", "gcp_batch", "azure_batch", "kubernetes"]
_CLOUDS_WITH_MEMORY_LIMITS: list[CloudName] = ["aws_batch", "kubernetes"]
"""Those whose machines are containers with a limit."""
_CLOUDS_WITH_RESTART_OPTION: list[CloudName] = ["aws_batch", "gcp_batch"]
"""Those whose provisioner can switch the restarts of lost machines off."""
_TRAINING_S = (0.0, 1.5)
"""The time from the first round in which an undisturbed run trains."""
_LATER_S = (0.0, 6.0)
"""The same for runs that an earlier fault prolongs."""


class MachineLoss(msgspec.Struct, frozen=True, tag=True):
    """Machines are preempted as soon as one is running."""

    at_s: float
    notice: bool
    is_total: bool = False
    """Whether all machines are preempted, or one."""
    since: FaultOrigin = "round"


class ApiFault(msgspec.Struct, frozen=True, tag=True):
    """The next `times` requests of the cloud's API fail, or all for `duration_s`."""

    at_s: float
    kind: ApiFaultKind
    times: int = 0
    duration_s: float = 0.0
    since: FaultOrigin = "round"


class CapacityLimit(msgspec.Struct, frozen=True, tag=True):
    """The capacity is one machine below the need for a time.

    If all are running, the cloud preempts the youngest one.
    """

    at_s: float
    duration_s: float
    since: FaultOrigin = "round"


class ApiRestart(msgspec.Struct, frozen=True, tag=True):
    """The servers of the cloud are restarted; its machines keep running."""

    at_s: float
    since: FaultOrigin = "round"


CloudFault = MachineLoss | ApiFault | CapacityLimit | ApiRestart


class MemoryUse(msgspec.Struct, frozen=True):
    """A worker exceeds the memory limit of its machine once."""

    step: int
    rank: int


class CloudChaosPlan(msgspec.Struct, frozen=True):
    """Everything that a seed decides."""

    seed: int
    cloud: CloudName
    machines: int
    """The number of machines, with a worker each."""
    store: Literal["file", "s3"] = "file"
    network_faults: network_faults.NetworkFaults = network_faults.NetworkFaults()
    """Faults of the bucket."""
    lag_s: float = 0.0
    boot_s: float = 0.2
    notice_s: float = 2.0
    restarts_machines: bool = True
    """Whether the cloud restarts lost machines by itself."""
    faults: tuple[CloudFault, ...] = ()
    memory_use: MemoryUse | None = None
    firewall: Firewall = ""
    """What machines cannot connect to: the run must end with the remedy."""
    time_budget_s: float | None = None
    """The budget of the first `fit()`; a second one continues the run."""
    steps: int = 40
    save_every: int = 5
    step_s: float = 0.03

    @property
    def name(self) -> str:
        """The name of the run."""
        return f"chaos-{self.seed}"

    def storage_path(self, folder: Path) -> str:
        """Return the storage path of the run whose files are in `folder`."""
        return "s3://chaos/runs" if self.store == "s3" else str(folder / "store")

    def sim_options(self, folder: Path) -> dict[str, Any]:
        """Return the options of the simulated cloud and of its provisioner."""
        options: dict[str, Any] = {
            "cloud": self.cloud,
            "root": str(folder / "cloud"),
            "seed": self.seed,
            "lag_s": self.lag_s,
            "boot_s": self.boot_s,
            "notice_s": self.notice_s,
            "firewall": self.firewall,
            "memory_limits": self.memory_use is not None,
        }
        if self.restarts_machines:
            return options
        restart_option = {"attempts": 1} if self.cloud == "aws_batch" else {"max_retries": 0}
        return options | restart_option

    def provisioner(self, folder: Path) -> str:
        """Return the provisioner of the trainer, as a user writes it."""
        options = self.sim_options(folder)
        del options["cloud"]
        given = {name: value for name, value in options.items() if value or name == "max_retries"}
        return f"sim://{self.cloud}?{urlencode(given)}"

    def timings(self) -> dict[str, float]:
        """Return the fields of `RunTiming` that differ from those of users, which are minutes."""
        if self.firewall:
            return {"reach_timeout_s": 8.0}
        if any(isinstance(fault, CapacityLimit) for fault in self.faults):
            return {"partial_capacity_timeout_s": 2.0, "partial_capacity_pause_s": 1.0}
        return {}

    def fault_kinds(self) -> set[str]:
        """Return the kinds of all faults of the plan."""
        kinds = {_kind_of(fault) for fault in self.faults}
        names = {
            "lagging reads": self.lag_s > 0,
            "memory": self.memory_use is not None,
            "time budget": self.time_budget_s is not None,
            f"firewall before {self.firewall}": bool(self.firewall),
            "bucket faults": self.network_faults != network_faults.no_faults(),
        }
        return kinds | {name for name, is_planned in names.items() if is_planned}


def _kind_of(fault: CloudFault) -> str:
    match fault:
        case MachineLoss(notice=notice, is_total=is_total):
            machines = "all machines" if is_total else "a machine"
            return f"loss of {machines} {'with' if notice else 'without'} notice"
        case ApiFault(kind=kind):
            return kind
        case CapacityLimit(since=since):
            return f"partial capacity from {since}"
        case ApiRestart():
            return "API restart"


def random_cloud_plan(seed: int) -> CloudChaosPlan:
    """Return the plan of a seed."""
    stream = SeededStreams(seed).stream("cloud plan")
    cloud = stream.choice(_CLOUDS)
    plan = CloudChaosPlan(
        seed,
        cloud,
        machines=stream.choice([2, 2, 3]),
        lag_s=stream.choice([0.0, 0.0, 1.0, 3.0]),
        boot_s=stream.uniform_in((0.2, 1.0)),
        notice_s=stream.uniform_in((2.0, 8.0)),
        restarts_machines=cloud not in _CLOUDS_WITH_RESTART_OPTION or stream.bernoulli(0.5),
    )
    end = stream.choice(["result"] * 15 + ["time budget"] * 3 + ["machines", "storage"])
    if end in ("machines", "storage"):
        # Without other faults, of which the run could end for another reason.
        firewall: Firewall = "machines" if end == "machines" else "storage"
        return replace(plan, firewall=firewall, store="s3" if end == "storage" else "file")
    plan = replace(plan, faults=_draw_faults(stream))
    if end == "time budget":
        # Slow steps: the budget ends while the run trains, if it has waited for machines or not.
        plan = replace(plan, time_budget_s=stream.uniform_in((8.0, 14.0)), step_s=0.25)
    elif stream.bernoulli(0.2):
        memory_use = MemoryUse(1 + int(40 * stream.random()), stream.choice([0, plan.machines - 1]))
        limited = stream.choice(_CLOUDS_WITH_MEMORY_LIMITS)
        plan = replace(
            plan,
            cloud=limited,
            memory_use=memory_use,
            restarts_machines=plan.restarts_machines or limited not in _CLOUDS_WITH_RESTART_OPTION,
        )
    if stream.bernoulli(0.25):
        plan = replace(plan, store="s3", network_faults=_draw_bucket_faults(stream, seed))
    return plan


def _draw_faults(stream: RandomStream) -> tuple[CloudFault, ...]:
    faults: list[CloudFault] = [
        MachineLoss(
            stream.uniform_in(_LATER_S if number else _TRAINING_S),
            notice=stream.bernoulli(0.5),
            is_total=stream.bernoulli(0.2),
            since=stream.choice(["round", "round", "round", "start"]),
        )
        for number in range(stream.choice([0, 1, 1, 2]))
    ]
    if stream.bernoulli(0.3) or not faults:
        duration_s = stream.uniform_in((1.0, 8.0))
        if stream.bernoulli(0.5):
            faults.append(CapacityLimit(0.0, duration_s, since="start"))
        else:
            faults.append(CapacityLimit(stream.uniform_in(_TRAINING_S), duration_s))
    if stream.bernoulli(0.35):
        # Around a loss, if there is one.
        first = faults[0]
        around_s = first.at_s if first.since == "round" else stream.uniform_in(_TRAINING_S)
        at_s = max(0.0, around_s + stream.uniform_in((-0.5, 0.5)))
        duration_s = stream.uniform_in((2.0, 20.0))
        faults.append(ApiFault(at_s, "credentials", duration_s=duration_s))
    if stream.bernoulli(0.4):
        faults.append(_draw_refusals(stream))
    if stream.bernoulli(0.15):
        faults.append(ApiRestart(stream.uniform_in(_LATER_S)))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _draw_refusals(stream: RandomStream) -> ApiFault:
    kinds: list[ApiFaultKind] = ["throttled", "unavailable", "quota", "capacity"]
    kind = stream.choice(kinds)
    times = 1 + int(5 * stream.random())
    at_s = stream.uniform_in(_TRAINING_S)
    if kind == "capacity":
        # Of a cloud it is a state, which no request ends.
        return ApiFault(at_s, kind, duration_s=float(times))
    # A quota that is too small for the first request ends the run, as documented.
    is_transient = kind in ("throttled", "unavailable")
    since: FaultOrigin = "start" if is_transient and stream.bernoulli(0.5) else "round"
    return ApiFault(at_s, kind, times=times, since=since)


def _draw_bucket_faults(stream: RandomStream, seed: int) -> network_faults.NetworkFaults:
    return network_faults.NetworkFaults(
        refusal_probability=stream.uniform_in((0.0, 0.03)),
        lost_response_probability=stream.uniform_in((0.0, 0.02)),
        slow_probability=stream.uniform_in((0.0, 0.1)),
        seed=seed,
    )
