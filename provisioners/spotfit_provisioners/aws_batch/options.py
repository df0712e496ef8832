"""What can be chosen of AWS Batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from spotfit.core.errors import ConfigError
from spotfit_provisioners.kit import images


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsBatchOptions:
    """Machines from AWS Batch, from queues whose compute environments are of type SPOT."""

    provisioner: ClassVar[str] = "aws_batch"

    queues: tuple[str, ...] = ()
    """Names or ARNs of job queues; `eu-west-1:spot` names one of another region. The first that
    takes a request gets it."""
    order: Literal["given", "price", "score"] = "given"
    """Which queue comes first: as they are written; by the present spot price of `instance_types`
    in their regions; or by EC2's own score of how likely each region is to have as many of them
    as a group wants. Those that are equal stay as they are written."""
    image: str = ""
    """Container image that holds spotfit and what the training function imports. `{python}` and
    `{torch}` in its name are the versions of whoever calls `fit()`; see `kit.images`."""
    region: str = ""
    """'' asks the AWS configuration of whoever calls."""
    workers_per_node: int = 1
    """How many workers share a machine."""
    memory_per_cpu_gib: float = 1.75
    """Main memory for each core where the workers did not ask for any; a container cannot have
    what its host's own system needs."""
    shared_memory_mib: int = 0
    """Size of /dev/shm; 0: half of the memory. Data loaders and NCCL need it."""
    job_role: str = ""
    """ARN of the role of the agents: it reads and writes the bucket and asks for machines."""
    execution_role: str = ""
    """ARN of the role that pulls the image and writes the logs."""
    instance_types: tuple[str, ...] = ()
    """Whose spot prices or scores are compared. Of fewer than three types all scores are low."""
    attempts: int = 10
    """How often Batch starts a machine's agent again after its host was lost: at most 10."""
    share: str = ""
    """Fair-share identifier, where the queue has a scheduling policy."""
    dwell_s: float = 600.0
    """How long a job may wait with a reason before that counts: reasons come and go while an
    environment grows from nothing."""
    tags: dict[str, str] = field(default_factory=dict)
    endpoint: str = ""
    """Where the API is, if not at AWS."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", images.chosen(self.image))
        if not 1 <= self.attempts <= 10:
            raise ConfigError(
                f"AwsBatchOptions(attempts={self.attempts}): Batch allows 1 to 10.",
                do="What is lost more often is asked for anew, whatever this says.",
            )
        if self.workers_per_node < 1:
            raise ConfigError("AwsBatchOptions(workers_per_node) must be at least 1.")
        if self.shared_memory_mib < 0 or self.memory_per_cpu_gib <= 0 or self.dwell_s < 0:
            raise ConfigError("AwsBatchOptions: sizes and durations are not below zero.")
        if self.order != "given" and not self.instance_types:
            raise ConfigError(
                f"AwsBatchOptions(order={self.order!r}) compares instance_types: none given.",
                do="Name those of the compute environments, or keep the given order.",
            )
