"""Options of the Slurm backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from spotfit.core.errors import ConfigError
from spotfit.provision.profile import check_minimums
from spotfit_provisioners.prices.given import check_prices


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """Nodes of a Slurm cluster. Empty options use the defaults of the cluster."""

    provisioner: ClassVar[str] = "slurm"

    partitions: tuple[str, ...] = ()
    """Allowed partitions; Slurm uses the one that can start the job first."""
    on_demand_partitions: tuple[str, ...] = ()
    """Partitions whose jobs are never preempted, for on-demand machines. With this option or
    `on_demand_qos`, jobs in `partitions` may be preempted."""
    account: str = ""
    qos: str = ""
    on_demand_qos: str = ""
    """QOS of on-demand machines instead of `qos`, whose jobs are never preempted; without
    `on_demand_partitions` in `partitions`."""
    constraint: str = ""
    """Required node features, in sbatch syntax: 'a100&nvlink'."""
    exclude: str = ""
    """Excluded nodes, in sbatch syntax: 'n[3-5]'."""
    reservation: str = ""
    gres: str = "gpu"
    """Generic resource name of GPUs, optionally with a type: 'gpu', 'gpu:a100'."""
    time: str = ""
    """Time limit of a task, in sbatch syntax: '1-12:00:00'. A task that reaches it is requeued."""
    exclusive: bool = False
    """Allocate whole nodes."""
    workers_per_node: int = 1
    """Number of workers per task."""
    memory_per_cpu_gib: float = 0.0
    """Memory per CPU core if `resources_per_worker` has no "memory"; 0: the cluster's default.
    Workers that request only GPUs get 4 CPUs per GPU."""
    modules: tuple[str, ...] = ()
    """Environment modules to load before an agent starts."""
    setup: tuple[str, ...] = ()
    """Shell lines to run before an agent starts: 'source /shared/venv/bin/activate'."""
    command_prefix: str = ""
    """Command that runs the agent: 'apptainer exec --nv /shared/spotfit.sif'."""
    python: str = "python"
    """The interpreter on the nodes or in the container."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the agents. Must not contain secrets: they are stored unencrypted
    with the run."""
    grace_s: float = 30.0
    """Time between SIGTERM and the end of a task, in seconds: the cluster's KillWait. Slurm also
    sends SIGTERM this long before the time limit."""
    work_dir: str = ""
    """Working directory of the tasks; '' is the directory of the caller."""
    output: str = "spotfit-%x-%a.log"
    """Output file of a task; %x is the group's token, %a the index of the task."""
    prices: dict[str, Any] = field(default_factory=dict)
    """Prices of a node in US dollars per hour, by partition: {'h100': {'on_demand': 20}}; '*' is
    any other. Without `on_demand_partitions` and `on_demand_qos`, a partition that has only an
    on-demand price has no preemptions."""
    extra_args: tuple[str, ...] = ()
    """Additional arguments of sbatch, for example '--nice=100'."""

    def __post_init__(self) -> None:
        check_prices(self.prices, option="SlurmOptions(prices=…)")
        check_minimums(self, workers_per_node=1, memory_per_cpu_gib=0, grace_s=0)
        both = sorted({*self.partitions} & {*self.on_demand_partitions})
        if both and not self.on_demand_qos:
            raise ConfigError(
                f"SlurmOptions: {', '.join(both)} is in partitions and in on_demand_partitions.",
                do="Write it in one of them, or set on_demand_qos.",
            )
        if invalid := [name for name in self.environment if not name.isidentifier()]:
            raise ConfigError(
                f"SlurmOptions(environment): {invalid[0]!r} is not a valid variable name.",
                do="Use letters, digits and '_', and no digit at the start.",
            )
        if invalid := [argument for argument in self.extra_args if not argument.startswith("-")]:
            raise ConfigError(
                f"SlurmOptions(extra_args): {invalid[0]!r} is not an option of sbatch: it does not "
                "start with '-'.",
                do="Write option and value as one string: '--nice=100'.",
            )
