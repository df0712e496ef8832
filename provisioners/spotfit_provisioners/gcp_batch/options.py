"""Options of the Google Cloud Batch backend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import ErrorCollector
from spotfit.provision.profile import LOGIN_NAME, check_minimums
from spotfit_provisioners.job_fields import images
from spotfit_provisioners.job_fields.names import LabelRules, check_labels
from spotfit_provisioners.prices.given import check_prices

# https://docs.cloud.google.com/batch/docs/organize-resources-using-labels reserves the prefixes.
LABEL_RULES = LabelRules(
    name=re.compile(r"[a-z][a-z0-9_-]{0,62}"),
    value=re.compile(r"[a-z0-9_-]{0,63}"),
    reserved=("goog-", "google-", "spotfit-"),
    max_count=54,  # of 64; spotfit and Batch have their own
    source="https://docs.cloud.google.com/resource-manager/docs/labels-overview",
)

# https://docs.cloud.google.com/batch/docs/automate-task-retries: 0 to 10
MAX_RETRIES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GcpBatchOptions:
    """VMs from Google Cloud Batch in one region; spot ones unless a request names another offer."""

    provisioner: ClassVar[str] = "gcp_batch"
    questions: ClassVar[Mapping[str, str]] = {
        "project": "Project; empty: that of the credentials",
        "region": "Region of the machines, such as us-central1",
        "image": "Container image, in a registry that the machines can read",
        "service_account": "Email of the agents' service account; empty: the default one",
        "machine_type": "Machine type, such as g2-standard-8; empty: chosen by Batch",
    }

    region: str = ""
    """Region of the jobs and machines, for example 'us-central1'."""
    project: str = ""
    """'' is the project of the caller's credentials."""
    zones: tuple[str, ...] = ()
    """Allowed zones of the region; empty: all zones."""
    image: str = ""
    """Container image with spotfit and the imports of the training function. `{python}` and
    `{torch}` in its name are replaced by the caller's versions; see `job_fields.images`."""
    service_account: str = ""
    """Email of the agents' service account. It needs access to the bucket and permission to create
    jobs. '' is Compute Engine's default service account."""
    machine_type: str = ""
    """For example 'g2-standard-8'; '' lets Batch choose by cores and memory."""
    accelerator: str = ""
    """Type of attached GPUs, for example 'nvidia-l4'; their number follows from the workers.
    Not needed for machine types with built-in GPUs."""
    install_gpu_drivers: bool = True
    """Let Batch install GPU drivers."""
    instance_template: str = ""
    """Name of an instance template that replaces `machine_type`, `accelerator`, `boot_disk_gb`
    and the network options; it must set the provisioning model SPOT."""
    on_demand_instance_template: str = ""
    """With `instance_template`: the template for groups that request an on-demand offer, with the
    provisioning model STANDARD."""
    boot_disk_gb: int = 0
    """0: 100 GB with GPUs, because a CUDA image does not fit into Batch's default; otherwise Batch
    chooses."""
    boot_image: str = "batch-cos"
    """Operating system of the VMs, as Batch names it. 'batch-cos' is Container-Optimized OS, for
    which firewall and GPU drivers are set up. '' lets Batch choose."""
    network: str = ""
    """For example 'global/networks/default'; '' is the default network."""
    subnetwork: str = ""
    """For example 'regions/us-central1/subnetworks/default'."""
    external_ip: bool = True
    """False requires Private Google Access, and Cloud NAT for downloads from other hosts."""
    workers_per_node: int = 1
    """Number of workers per machine."""
    memory_per_cpu_gib: float = 3.0
    """Memory per CPU core if `resources_per_worker` has no "memory". If Batch chooses the machine
    type, workers with GPUs get at least 4 CPUs and 14 GiB per GPU."""
    shared_memory_mib: int = 0
    """Size of /dev/shm, which data loaders and NCCL need; 0: that of the VM, half of its memory."""
    max_retries: int = MAX_RETRIES
    """How often Batch restarts the agent of a machine after a lost VM, at most 10."""
    notice_s: float = 0.0
    """Time between the preemption notice and the shutdown of a VM. Google's default is 0; an
    instance template can set 120 (preview)."""
    cloud_logging: bool = True
    """Write agents' output to Cloud Logging as well."""
    labels: dict[str, str] = field(default_factory=dict)
    """Additional labels of jobs and VMs."""
    prices: dict[str, Any] = field(default_factory=dict)
    """Prices that take precedence over those of Google, in US dollars per machine and hour:
    {'a3-highgpu-8g': {'spot': 25.5, 'on_demand': 88.5}}. '*' stands for all other machine types."""
    cost_project: str = ""
    """Value of the label `spotfit-project` of everything that is rented, for the allocation of
    costs; '' omits it."""
    user: str = field(default="", metadata=LOGIN_NAME)
    """Value of the label `spotfit-user`; '' is the login name of the caller of `fit()`."""
    endpoint: str = ""
    """URL of the API; '' is Google's. Credentials are not sent to http:// URLs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", images.resolve_image(self.image))
        problems: dict[str, str] = {}  # with their remedies; all are reported together
        if not 0 <= self.max_retries <= MAX_RETRIES:
            problems[
                f"GcpBatchOptions(max_retries={self.max_retries}) must be from 0 to {MAX_RETRIES}, "
                "the range that Batch allows."
            ] = f"Set max_retries={MAX_RETRIES} or less. Machines lost more often are replaced."
        # Batch accepts only zones of the job's region, by name and not by URL.
        if foreign := [zone for zone in self.zones if zone.rpartition("-")[0] != self.region]:
            problems[
                f"GcpBatchOptions(zones={self.zones}) contains zones outside of the region "
                f"{self.region!r}: {', '.join(foreign)}."
            ] = "Write zones by name ('us-central1-a'), all of the region set by region=…."
        # Batch takes either a template or a policy with these properties.
        replaced = ("machine_type", "accelerator", "boot_disk_gb", "network", "subnetwork")
        conflicts = [name for name in replaced if getattr(self, name)]
        if self.instance_template and conflicts:
            problems[
                f"GcpBatchOptions(instance_template={self.instance_template!r}) cannot be combined "
                f"with {', '.join(conflicts)}: the template defines these properties."
            ] = f"Remove {', '.join(conflicts)}, or remove instance_template."
        if self.on_demand_instance_template and not self.instance_template:
            problems["GcpBatchOptions(on_demand_instance_template=…) needs instance_template."] = (
                "Set both, or neither: without templates, spotfit sets the provisioning model."
            )
        errors = ErrorCollector()
        errors.check(lambda: check_prices(self.prices, option="GcpBatchOptions(prices=…)"))
        errors.check(
            lambda: check_labels(self.labels, LABEL_RULES, option="GcpBatchOptions(labels=…)")
        )
        errors.check(
            lambda: check_minimums(
                self,
                workers_per_node=1,
                shared_memory_mib=0,
                boot_disk_gb=0,
                notice_s=0,
                above_zero=["memory_per_cpu_gib"],
            )
        )
        for problem, remedy in problems.items():
            errors.add(ConfigError(problem, do=remedy))
        errors.raise_all()
