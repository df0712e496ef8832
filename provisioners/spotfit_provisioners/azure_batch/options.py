"""What can be chosen of Azure Batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from spotfit.core.errors import ConfigError
from spotfit.core.mistakes import Mistakes
from spotfit_provisioners.kit import images

MOST_NODES = 100
"""Of a pool whose nodes reach each other: https://learn.microsoft.com/azure/batch/batch-quota-limit."""
_NEEDED_FOR_A_POOL = ("account_id", "vm_size", "identity")


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureBatchOptions:
    """Spot nodes from a pool of Azure Batch that scales to zero."""

    provisioner: ClassVar[str] = "azure_batch"

    endpoint: str = ""
    """Of the Batch account, as 'https://training.westeurope.batch.azure.com'. No credentials go to
    one that begins with http://."""
    image: str = ""
    """Container image that holds spotfit and what the training function imports. `{python}` and
    `{torch}` in its name are the versions of whoever calls `fit()`; see `kit.images`."""
    registry: str = ""
    """Server the image is pulled from as `identity`, as 'training.azurecr.io'; '' asks nobody."""
    pool: str = ""
    """Whose nodes are used; '' names it after what it is made of. One that is not there is made, if
    `account_id`, `vm_size` and `identity` are given."""
    account_id: str = ""
    """Resource id of the Batch account, as '/subscriptions/…/batchAccounts/training'."""
    identity: str = ""
    """Resource id of the user-assigned identity that nodes have: who the agents are."""
    identity_client_id: str = ""
    """Its client id: which one agents are, where nodes have several."""
    vm_size: str = ""
    """As 'Standard_NC4as_T4_v3': cores, memory and GPUs of the workers must fit into it."""
    vm_image: str = "microsoft-dsvm:ubuntu-hpc:2204:latest"
    """Publisher, offer, sku and version of the nodes' system, which must hold a container engine
    and, for GPUs, their drivers."""
    node_agent: str = "batch.node.ubuntu 22.04"
    """Batch's own agent for that system."""
    subnet: str = ""
    """Resource id of the subnet that nodes are in; '' is one of Batch's own."""
    public_ip: bool = True
    """False needs a `subnet`, and another way out of it to the bucket and to Azure."""
    most_nodes: int = MOST_NODES
    """How many nodes the pool may have."""
    workers_per_node: int = 1
    """How many workers share a machine."""
    container_options: tuple[str, ...] = ()
    """Further words for `docker create`, as '--volume=/mnt/data:/data'."""
    resource_files: tuple[str, ...] = ()
    """URLs of blobs that are laid into the working directory before an agent starts; `identity`
    reads those that are not public."""
    labels: dict[str, str] = field(default_factory=dict)
    """Metadata of the jobs."""
    management: str = "https://management.azure.com"
    """Where pools are made: Azure Resource Manager."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", images.chosen(self.image))
        mistakes = Mistakes()
        mistakes.check(self._check_numbers)
        mistakes.check(self._check_system)
        mistakes.check(self._check_network)
        mistakes.check(self._check_files)
        mistakes.raise_all()

    @property
    def makes_pool(self) -> bool:
        """Whether a pool can be made of these."""
        return all(getattr(self, name) for name in _NEEDED_FOR_A_POOL)

    @property
    def missing(self) -> list[str]:
        """What has to be given yet."""
        needed = ("endpoint", "image") if self.pool else ("endpoint", "image", *_NEEDED_FOR_A_POOL)
        return [name for name in needed if not getattr(self, name)]

    def _check_numbers(self) -> None:
        if not 1 <= self.most_nodes <= MOST_NODES:
            raise ConfigError(
                f"AzureBatchOptions(most_nodes={self.most_nodes}): a pool whose nodes reach each "
                f"other has 1 to {MOST_NODES}.",
                do="Take larger machines with more workers on each for more workers.",
            )
        if self.workers_per_node < 1:
            raise ConfigError("AzureBatchOptions(workers_per_node) must be at least 1.")

    def _check_system(self) -> None:
        if self.vm_image.count(":") != 3:
            raise ConfigError(
                f"AzureBatchOptions(vm_image={self.vm_image!r}) names no system.",
                do="Write publisher:offer:sku:version.",
            )

    def _check_network(self) -> None:
        if not self.public_ip and not self.subnet:
            raise ConfigError(
                "AzureBatchOptions(public_ip=False) needs a subnet of your own.",
                do="Set subnet='/subscriptions/…/subnets/…', with a way out to Azure.",
            )

    def _check_files(self) -> None:
        signed = [url for url in self.resource_files if "sig=" in url]
        if signed:
            raise ConfigError(
                "AzureBatchOptions(resource_files): a signature in a URL would be written down "
                "with the run's options.",
                do="Name the blob without it, and let `identity` read it.",
            )
