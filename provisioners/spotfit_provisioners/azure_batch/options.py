"""Options of the Azure Batch backend."""

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

LABEL_RULES = LabelRules(
    name=re.compile(r"[^<>%&\\?/]{1,512}"),
    value=re.compile(r".{0,256}"),
    reserved=("spotfit-",),
    max_count=40,  # of 50; spotfit has its own
    source="https://learn.microsoft.com/azure/azure-resource-manager/management/tag-resources",
)

MAX_POOL_NODES = 100
"""Limit of a pool with inter-node communication:
https://learn.microsoft.com/azure/batch/batch-quota-limit"""
# The other properties of a pool have default values.
_REQUIRED_FOR_POOL = ("account_id", "vm_size", "identity")


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureBatchOptions:
    """Nodes from an Azure Batch pool that scales to zero; spot ones unless a request names another
    offer."""

    provisioner: ClassVar[str] = "azure_batch"
    questions: ClassVar[Mapping[str, str]] = {
        "endpoint": "URL of the Batch account, such as https://mine.westeurope.batch.azure.com",
        "image": "Container image",
        "registry": "Registry of the image, such as mine.azurecr.io; empty: a public one",
        "account_id": "Resource id of the Batch account",
        "identity": "Resource id of the managed identity of the nodes",
        "vm_size": "VM size, such as Standard_D8ds_v5",
    }

    endpoint: str = ""
    """URL of the Batch account, for example 'https://training.westeurope.batch.azure.com'.
    Credentials are not sent to http:// URLs."""
    image: str = ""
    """Container image with spotfit and the imports of the training function. `{python}` and
    `{torch}` in its name are replaced by the caller's versions; see `job_fields.images`."""
    registry: str = ""
    """Registry from which the image is pulled as `identity`, for example 'training.azurecr.io';
    '' pulls without authentication."""
    pool: str = ""
    """Name of the pool; '' derives it from the pool's properties. A missing pool is created if
    `account_id`, `vm_size` and `identity` are set."""
    on_demand_pool: str = ""
    """Name of another pool for groups that request an on-demand offer, with dedicated nodes; '' and
    a missing pool as for `pool`. Without a common `subnet`, its nodes cannot connect to those of
    the spot pool."""
    account_id: str = ""
    """Resource id of the Batch account: '/subscriptions/…/batchAccounts/training'."""
    identity: str = ""
    """Resource id of the user-assigned managed identity of the nodes, which the agents use."""
    identity_client_id: str = ""
    """Client id of the identity; needed if nodes have several identities."""
    vm_size: str = ""
    """For example 'Standard_NC4as_T4_v3'; the resources of the workers must fit into it."""
    # Batch ends its support of Ubuntu 22.04 on 2027-06-30: https://github.com/Azure/Batch/issues/200
    vm_image: str = "microsoft-dsvm:ubuntu-hpc:2404:latest"
    """Publisher, offer, SKU and version of the nodes' operating system image. It must contain a
    container engine and, for GPUs, drivers."""
    node_agent_sku: str = "batch.node.ubuntu 24.04"
    """SKU of the Batch node agent for that image."""
    subnet: str = ""
    """Resource id of the nodes' subnet; '' is a network of Batch."""
    public_ip: bool = True
    """False needs a `subnet` with another route to the bucket and to Azure."""
    max_nodes: int = MAX_POOL_NODES
    """Largest number of nodes of the pool."""
    workers_per_node: int = 1
    """Number of workers per machine."""
    container_options: tuple[str, ...] = ()
    """Further arguments of `docker create`, for example '--volume=/mnt/data:/data'."""
    resource_files: tuple[str, ...] = ()
    """URLs of blobs that are downloaded to the working directory before an agent starts;
    `identity` reads blobs that are not public."""
    labels: dict[str, str] = field(default_factory=dict)
    """Additional metadata of jobs, and of the pool that is created."""
    prices: dict[str, Any] = field(default_factory=dict)
    """Prices that take precedence over those of Azure, in US dollars per machine and hour:
    {'Standard_NC6s_v3': {'spot': 0.9, 'on_demand': 3.1}}. '*' stands for all other VM sizes."""
    cost_project: str = ""
    """Value of the metadata `spotfit-project` of everything that is rented, for the allocation of
    costs; '' omits it."""
    user: str = field(default="", metadata=LOGIN_NAME)
    """Value of the metadata `spotfit-user`; '' is the login name of the caller of `fit()`."""
    management_endpoint: str = "https://management.azure.com"
    """URL of Azure Resource Manager, which creates pools."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", images.resolve_image(self.image))
        problems: dict[str, str] = {}  # with their remedies; all are reported together
        if not 1 <= self.max_nodes <= MAX_POOL_NODES:
            problems[
                f"AzureBatchOptions(max_nodes={self.max_nodes}) must be from 1 to "
                f"{MAX_POOL_NODES}, the size of a pool with inter-node communication."
            ] = "For more workers, use larger machines with more workers_per_node."
        if self.vm_image.count(":") != 3:
            problems[
                f"AzureBatchOptions(vm_image={self.vm_image!r}) is not an image reference "
                "of the form publisher:offer:sku:version."
            ] = "Write for example vm_image='microsoft-dsvm:ubuntu-hpc:2404:latest'."
        if self.pool and self.pool == self.on_demand_pool:
            problems[
                f"AzureBatchOptions(pool=…, on_demand_pool=…) are the same pool {self.pool!r}."
            ] = "Use two pools: Batch cannot choose between spot and dedicated nodes for a task."
        # Batch assigns private addresses only to nodes in a subnet of the user.
        if not self.public_ip and not self.subnet:
            problems[
                "AzureBatchOptions(public_ip=False) needs a subnet, but subnet is not set."
            ] = "Set subnet='/subscriptions/…/subnets/…', with a route to Azure."
        # 'sig' is the signature of a shared access signature (SAS).
        if any("sig=" in url for url in self.resource_files):
            problems[
                "AzureBatchOptions(resource_files): a URL contains a signature, which would "
                "be stored unencrypted with the run's options."
            ] = "Remove the signature from the URL, and give `identity` access to the blob."
        errors = ErrorCollector()
        errors.check(lambda: check_prices(self.prices, option="AzureBatchOptions(prices=…)"))
        errors.check(
            lambda: check_labels(self.labels, LABEL_RULES, option="AzureBatchOptions(labels=…)")
        )
        errors.check(lambda: check_minimums(self, workers_per_node=1))
        for problem, remedy in problems.items():
            errors.add(ConfigError(problem, do=remedy))
        errors.raise_all()

    @property
    def can_create_pool(self) -> bool:
        """Whether all options that creating a pool needs are set."""
        return all(getattr(self, name) for name in _REQUIRED_FOR_POOL)

    @property
    def missing_options(self) -> list[str]:
        """Names of required options that are not set."""
        required = ("endpoint", "image", *(() if self.pool else _REQUIRED_FOR_POOL))
        return [name for name in required if not getattr(self, name)]
