"""Options of the AWS Batch backend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from spotfit.core.errors import ConfigError
from spotfit.provision.profile import LOGIN_NAME, check_minimums
from spotfit_provisioners.job_fields import images
from spotfit_provisioners.job_fields.names import LabelRules, check_labels
from spotfit_provisioners.prices.given import check_prices

# Letters and digits of any language; `\w` without '_' is added by the set itself.
_TAG_CHARACTERS = r"[\w\s.:/=+@-]"
TAG_RULES = LabelRules(
    name=re.compile(f"{_TAG_CHARACTERS}{{1,128}}"),
    value=re.compile(f"{_TAG_CHARACTERS}{{0,256}}"),
    reserved=("aws:", "spotfit:"),
    max_count=40,  # of 50; spotfit has its own
    source="https://docs.aws.amazon.com/batch/latest/userguide/using-tags.html",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsBatchOptions:
    """Instances from AWS Batch job queues; spot ones unless a request names an on-demand offer."""

    provisioner: ClassVar[str] = "aws_batch"
    questions: ClassVar[Mapping[str, str]] = {
        "queues": "Job queues, separated by commas",
        "region": "Region of the queues; empty: that of the AWS configuration",
        "image": "Container image, in a registry that the machines can read",
        "job_role": "ARN of the agents' role; empty: that of the instances",
        "execution_role": "ARN of the role that pulls the image; empty: none",
    }

    queues: tuple[str, ...] = ()
    """Names or ARNs of job queues with compute environments of type SPOT; `eu-west-1:spot` is a
    queue of another region. A group is submitted to the first one, and to the next one after
    `pending_timeout_s`."""
    on_demand_queues: tuple[str, ...] = ()
    """Job queues with compute environments of type EC2, in the form of `queues`. Only groups that
    request an on-demand offer are submitted to them."""
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
    """Memory per CPU core if `resources_per_worker` has no "memory". Workers with GPUs get at least
    the memory that instances have per GPU; see `instance_types`."""
    shared_memory_mib: int = 0
    """Size of /dev/shm, which data loaders and NCCL need; 0: half of the memory."""
    job_role: str = ""
    """ARN of the agents' role. It needs access to the bucket and permission to submit jobs."""
    execution_role: str = ""
    """ARN of the role that pulls the image and writes logs."""
    instance_types: tuple[str, ...] = ()
    """Instance types of the compute environments. Their prices or scores are compared; EC2 gives
    low scores to fewer than three types. Workers that request only GPUs get the vCPUs and 7/8 of
    the memory that the smallest of these types has per GPU, else 4 vCPUs and 14 GiB per GPU."""
    attempts: int = 10
    """How often Batch starts the agent of a machine, restarts after a lost host included; 1 to
    10."""
    log_group: str = "/aws/batch/job"
    """CloudWatch log group of the machines. The default one of Batch keeps everything
    indefinitely."""
    efa_devices: int = 0
    """Number of Elastic Fabric Adapters per machine that containers use; 0: none. The compute
    environment needs instance types and a launch template with them."""
    share_identifier: str = ""
    """Fair-share identifier, for queues with a scheduling policy."""
    pending_timeout_s: float = 600.0
    """How long a job may be RUNNABLE before that is treated as a refusal, with a status reason or,
    if another queue is left, without. A compute environment that scales up from zero reports
    temporary reasons."""
    tags: dict[str, str] = field(default_factory=dict)
    """Additional tags of jobs and their ECS tasks. Instances have the tags of their compute
    environment."""
    prices: dict[str, Any] = field(default_factory=dict)
    """Prices that take precedence over those of AWS, in US dollars per machine and hour:
    {'p5.48xlarge': {'spot': 14.5, 'on_demand': 55.04}}. '*' stands for all other machine types."""
    cost_project: str = ""
    """Value of the tag `spotfit:project` of everything that is rented, for the allocation of costs;
    '' omits it."""
    user: str = field(default="", metadata=LOGIN_NAME)
    """Value of the tag `spotfit:user`; '' is the login name of the caller of `fit()`."""
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
        check_prices(self.prices, option="AwsBatchOptions(prices=…)")
        check_labels(self.tags, TAG_RULES, option="AwsBatchOptions(tags=…)")
        check_minimums(
            self,
            workers_per_node=1,
            shared_memory_mib=0,
            pending_timeout_s=0,
            efa_devices=0,
            above_zero=["memory_per_cpu_gib"],
        )
        if both := sorted(set(self.queues) & set(self.on_demand_queues)):
            raise ConfigError(
                f"AwsBatchOptions(queues=…, on_demand_queues=…) both contain {', '.join(both)}.",
                do="Use a queue with environments of type SPOT in queues, and another one with "
                "environments of type EC2 in on_demand_queues.",
            )
        if self.queue_order != "given" and not self.instance_types:
            raise ConfigError(
                f"AwsBatchOptions(queue_order={self.queue_order!r}) compares instance types, but "
                "instance_types is not set.",
                do="Set instance_types to those of the compute environments, or use "
                "queue_order='given'.",
            )
