"""Options of the AWS Batch backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from spotfit.core.errors import ConfigError
from spotfit.provision.profile import check_minimums
from spotfit_provisioners.job_fields import images


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsBatchOptions:
    """Spot instances from AWS Batch job queues with compute environments of type SPOT."""

    provisioner: ClassVar[str] = "aws_batch"

    queues: tuple[str, ...] = ()
    """Names or ARNs of job queues; `eu-west-1:spot` is a queue of another region. A group is
    submitted to the first one, and to the next one after `pending_timeout_s`."""
    queue_order: Literal["given", "price", "score"] = "given"
    """Order of the queues: 'given' as listed; 'price' by the current spot price of
    `instance_types` in their regions; 'score' by EC2's spot placement score, the likelihood that
    a region has enough machines. Equal queues keep the listed order."""
    image: str = ""
    """Container image with spotfit and the imports of the training function. `{python}` and
    `{torch}` in its name are replaced by the caller's versions; see `job_fields.images`."""
    region: str = ""
    """'' uses the region of the caller: AWS_REGION, AWS_DEFAULT_REGION, or that of the profile. It
    is recorded in the run, so that machines request their replacements in the same region."""
    workers_per_node: int = 1
    """Number of workers per machine."""
    # 1.75 instead of the 2 GiB per core of compute-optimised instances: the host's own system
    # needs the rest, and a job that requests all of it is never started.
    memory_per_cpu_gib: float = 1.75
    """Memory per CPU core if `resources_per_worker` has no "memory"."""
    shared_memory_mib: int = 0
    """Size of /dev/shm, which data loaders and NCCL need; 0: half of the memory."""
    job_role: str = ""
    """ARN of the agents' role. It needs access to the bucket and permission to submit jobs."""
    execution_role: str = ""
    """ARN of the role that pulls the image and writes logs."""
    instance_types: tuple[str, ...] = ()
    """Instance types whose prices or scores are compared. EC2 gives low scores to fewer than
    three types."""
    attempts: int = 10
    """How often Batch starts the agent of a machine, restarts after a lost host included; 1 to
    10."""
    share_identifier: str = ""
    """Fair-share identifier, for queues with a scheduling policy."""
    pending_timeout_s: float = 600.0
    """How long a job may be RUNNABLE before that is treated as a refusal, with a status reason or,
    if another queue is left, without. A compute environment that scales up from zero reports
    temporary reasons."""
    tags: dict[str, str] = field(default_factory=dict)
    """Additional tags of jobs."""
    endpoint: str = ""
    """URL of the API; '' is AWS."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", images.resolve_image(self.image))
        # https://docs.aws.amazon.com/batch/latest/APIReference/API_RetryStrategy.html
        if not 1 <= self.attempts <= 10:
            raise ConfigError(
                f"AwsBatchOptions(attempts={self.attempts}) must be from 1 to 10, the "
                "range that AWS Batch allows.",
                do="Set attempts=10 or less. Machines that are lost more often are replaced.",
            )
        check_minimums(
            self,
            workers_per_node=1,
            shared_memory_mib=0,
            pending_timeout_s=0,
            above_zero=["memory_per_cpu_gib"],
        )
        if self.queue_order != "given" and not self.instance_types:
            raise ConfigError(
                f"AwsBatchOptions(queue_order={self.queue_order!r}) compares instance types, but "
                "instance_types is not set.",
                do="Set instance_types to those of the compute environments, or use "
                "queue_order='given'.",
            )
