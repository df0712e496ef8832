"""What can be chosen of Google Cloud Batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from spotfit.core.errors import ConfigError
from spotfit.core.mistakes import Mistakes
from spotfit_provisioners.kit import images

MOST_RETRIES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GcpBatchOptions:
    """Spot VMs from Google Cloud Batch, in one region."""

    provisioner: ClassVar[str] = "gcp_batch"

    region: str = ""
    """Where jobs and their machines are, as 'us-central1'."""
    project: str = ""
    """'' is the project of the credentials of whoever calls."""
    zones: tuple[str, ...] = ()
    """Zones of the region that machines may come from; none named: all of them."""
    image: str = ""
    """Container image that holds spotfit and what the training function imports. `{python}` and
    `{torch}` in its name are the versions of whoever calls `fit()`; see `kit.images`."""
    service_account: str = ""
    """Email of who the agents are: it reads and writes the bucket and asks for machines. '' is
    Compute Engine's default one."""
    machine_type: str = ""
    """As 'g2-standard-8'; '' lets Batch choose by cores and memory."""
    accelerator: str = ""
    """Type of the GPUs that are attached, as 'nvidia-l4'; how many, the workers say. Machine types
    that have theirs built in need none."""
    gpu_drivers: bool = True
    """Have Batch install the drivers, where there are GPUs."""
    instance_template: str = ""
    """Name of an instance template of the project to make machines from, instead of
    `machine_type`, `accelerator`, `boot_disk_gb` and the network; it must say SPOT itself."""
    boot_disk_gb: int = 0
    """0 lets Batch choose."""
    network: str = ""
    """As 'global/networks/default'; '' is the default one."""
    subnetwork: str = ""
    """As 'regions/us-central1/subnetworks/default'."""
    external_ip: bool = True
    """False needs Private Google Access, and Cloud NAT for whatever else is fetched."""
    workers_per_node: int = 1
    """How many workers share a machine."""
    memory_per_cpu_gib: float = 3.0
    """Main memory for each core where the workers did not ask for any."""
    shared_memory_mib: int = 0
    """Size of /dev/shm; 0: half of the memory. Data loaders and NCCL need it."""
    retries: int = MOST_RETRIES
    """How often Batch starts a machine's agent again after its VM was lost: at most 10."""
    notice_s: float = 0.0
    """How long before its shutdown a VM is told of it. Google's own is 0; an instance template can
    ask for 120 (preview)."""
    logs: bool = True
    """Whether what agents print goes to Cloud Logging as well."""
    labels: dict[str, str] = field(default_factory=dict)
    endpoint: str = ""
    """Where the API is, if not at Google. No credentials go to one that begins with http://."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", images.chosen(self.image))
        mistakes = Mistakes()
        mistakes.check(self._check_numbers)
        mistakes.check(self._check_places)
        mistakes.check(self._check_template)
        mistakes.raise_all()

    def _check_numbers(self) -> None:
        if not 0 <= self.retries <= MOST_RETRIES:
            raise ConfigError(
                f"GcpBatchOptions(retries={self.retries}): Batch allows 0 to {MOST_RETRIES}.",
                do="What is lost more often is asked for anew, whatever this says.",
            )
        if self.workers_per_node < 1:
            raise ConfigError("GcpBatchOptions(workers_per_node) must be at least 1.")
        sizes = (self.shared_memory_mib, self.boot_disk_gb, self.notice_s)
        if min(sizes) < 0 or self.memory_per_cpu_gib <= 0:
            raise ConfigError("GcpBatchOptions: sizes and durations are not below zero.")

    def _check_places(self) -> None:
        """Batch takes zones of the job's own region only, and a location's name is no URL."""
        foreign = [zone for zone in self.zones if zone.rpartition("-")[0] != self.region]
        if foreign:
            raise ConfigError(
                f"GcpBatchOptions(zones={foreign}): no zones of the region {self.region!r}.",
                do="Name zones as 'us-central1-a'; for another region, ask for another group.",
            )

    def _check_template(self) -> None:
        instead = ("machine_type", "accelerator", "boot_disk_gb", "network", "subnetwork")
        both = [name for name in instead if getattr(self, name)]
        if self.instance_template and both:
            raise ConfigError(
                f"GcpBatchOptions(instance_template) replaces {', '.join(both)}.",
                do="Say it in the template, or use none.",
            )
