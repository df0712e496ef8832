"""What can be chosen of Slurm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from spotfit.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """Nodes of a cluster that Slurm shares out. What is '' is left to the cluster."""

    provisioner: ClassVar[str] = "slurm"

    partitions: tuple[str, ...] = ()
    """Any of them; the one that can begin first is taken."""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    """Features that a node must have, as sbatch reads them: 'a100&nvlink'."""
    exclude: str = ""
    """Nodes not to be used, as sbatch reads them: 'n[3-5]'."""
    reservation: str = ""
    gres: str = "gpu"
    """What accelerators are called here, with or without their kind: 'gpu', 'gpu:a100'."""
    time: str = ""
    """Limit for a task, as sbatch reads it: '1-12:00:00'. Near it a task begins anew."""
    exclusive: bool = False
    """Whole nodes, shared with nobody."""
    workers_per_node: int = 1
    """How many workers share a task."""
    memory_per_cpu_gib: float = 0.0
    """Main memory for each core where the workers did not ask for any; 0: the cluster's own."""
    modules: tuple[str, ...] = ()
    """Loaded before an agent starts."""
    setup: tuple[str, ...] = ()
    """Lines of shell before an agent starts: 'source /shared/venv/bin/activate'."""
    container: str = ""
    """A command to run the agent by: 'apptainer exec --nv /shared/spotfit.sif'."""
    python: str = "python"
    """The interpreter, on the nodes or in the container."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for the agents. No secrets: whoever may look at the run can read them."""
    grace_s: float = 30.0
    """How long a task goes on after SIGTERM: the cluster's KillWait, and the time that is
    left when the end of `time` is near."""
    folder: str = ""
    """Where tasks run and write their output; '' is the directory of whoever asks."""
    output: str = "spotfit-%x-%a.log"
    """A task's own output; %x is the group's token, %a the task."""
    extra: tuple[str, ...] = ()
    """More options for sbatch, word by word: '--nice=100'."""

    def __post_init__(self) -> None:
        if self.workers_per_node < 1:
            raise ConfigError("SlurmOptions(workers_per_node) must be at least 1.")
        if self.memory_per_cpu_gib < 0 or self.grace_s < 0:
            raise ConfigError("SlurmOptions: sizes and durations are not below zero.")
        if wrong := [name for name in self.environment if not name.isidentifier()]:
            raise ConfigError(f"SlurmOptions(environment) names {wrong[0]!r}: no variable's name.")
        if strange := [word for word in self.extra if not word.startswith("-")]:
            raise ConfigError(
                f"SlurmOptions(extra) holds {strange[0]!r}, which is no option of sbatch.",
                do="Write name and value as one word: '--nice=100'.",
            )
