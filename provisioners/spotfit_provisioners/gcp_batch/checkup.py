"""Account checks of the Google Cloud Batch backend.

Permissions are checked with `testIamPermissions`, which reports only the caller's own permissions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

from spotfit.core.errors import ConfigError, ProvisionPermissionError, QuotaError
from spotfit.provision.api import AccountCheck, CheckSkippedError, run_check, skip_if_denied
from spotfit_provisioners.gcp_batch import network
from spotfit_provisioners.gcp_batch.client import GcpBatchClient, GcpRestClient
from spotfit_provisioners.gcp_batch.options import GcpBatchOptions
from spotfit_provisioners.job_fields import images

BATCH_PERMISSIONS = (
    "batch.jobs.create",
    "batch.jobs.delete",
    "batch.jobs.get",
    "batch.jobs.list",
    "batch.tasks.list",
)
"""Part of roles/batch.jobsEditor. Cancelling a job needs the permission to delete it."""
READ_LOGS_PERMISSION = "logging.logEntries.list"
ACT_AS_PERMISSION = "iam.serviceAccounts.actAs"
AGENT_ROLES = ("roles/batch.agentReporter", "roles/batch.jobsEditor")
"""The first role lets the Batch service agent on the VM report: without it no task starts."""
# With any of these, a missing role above is no reason for doubt.
_BROADER_ROLES = ("roles/owner", "roles/editor", "roles/batch.admin")
_REMEDY_ROLES = (
    "Grant this account the roles in the rows 'you' of docs/guides/gcp_batch.md, or add it to "
    "users of infra/terraform/stacks/gcp and apply that."
)


def check_account(
    options: GcpBatchOptions, open_client: Callable[[], GcpBatchClient], storage: str = ""
) -> Iterator[AccountCheck]:
    """Run all checks; without valid credentials only the first one."""
    clients: list[GcpBatchClient] = []

    def connect() -> str:
        clients.append(open_client())
        return f"project {clients[-1].project}"

    yield run_check("Google Cloud credentials are valid", connect)
    for client in clients:
        yield run_check(f"jobs can be listed in {options.region}", client.check_access)
        yield from _GcpAccountChecks(options, client, storage).run()


class _GcpAccountChecks:
    """Checks that need a client."""

    def __init__(self, options: GcpBatchOptions, client: GcpBatchClient, storage: str) -> None:
        self._options = options
        self._bucket = storage.partition("://")[2].split("/")[0].split("?")[0]
        self._has_bucket = storage.startswith(("gs://", "gcs://"))
        self._project = client.project
        self._services = GcpRestClient(options.endpoint)

    def run(self) -> Iterator[AccountCheck]:
        options = self._options
        yield run_check(f"Batch is available in {options.region}", self._check_region)
        yield run_check("the machine type is available", self._check_machines)
        yield run_check(
            "the caller may rent machines", lambda: self._check_own_permissions(BATCH_PERMISSIONS)
        )
        yield run_check(
            "the caller may read machine output",
            lambda: self._check_own_permissions((READ_LOGS_PERMISSION,)),
        )
        yield run_check("the agents' service account can be used", self._check_service_account)
        yield run_check("agents have the required roles", self._check_agent_roles)
        yield run_check("the image exists", self._check_image)
        yield run_check("the quota allows a machine", self._check_quota)
        yield run_check("machines can connect to each other", self._check_firewall)
        yield run_check("machines reach Google Cloud", self._check_routes)
        yield run_check("the GPUs can run the image", self._check_gpu)
        if self._has_bucket:
            yield run_check("the bucket is near the machines", self._check_bucket_location)

    # --- quotas and network ------------------------------------------------------------------

    def _check_quota(self) -> str:
        """Raise `QuotaError` if the quotas do not allow one machine."""
        options = self._options
        gpu = network.gpu_type(options.machine_type, options.accelerator)
        with skip_if_denied():
            region = self._get_compute_resource(f"regions/{options.region}") or {}
            path = f"/compute/v1/projects/{self._project}"
            project = self._services.get("compute", path, "read the quotas") or {}
        # The number of machines, their cores and GPUs follow from a run; this is the least one.
        short, enough = network.missing_quotas(
            region.get("quotas", []),
            project.get("quotas", []),
            cpus=options.workers_per_node,
            gpus=1 if gpu else 0,
            gpu=gpu,
        )
        if short:
            raise QuotaError(
                f"The quotas of {self._project} in {options.region} do not allow a machine: "
                f"{'; '.join(short)}. New projects have no quota for GPUs.",
                do="Request higher values under IAM & Admin → Quotas, or `gcloud beta quotas "
                "preferences create`.",
            )
        if not enough:
            raise CheckSkippedError("Compute Engine does not name the quotas of the region")
        return "; ".join(enough)

    def _subnetworks(self) -> list[dict[str, Any]]:
        """Return the subnetworks of the machines' network in the region."""
        if self._options.instance_template:
            raise CheckSkippedError("the network is that of the instance template")
        path = f"/compute/v1/projects/{self._project}/regions/{self._options.region}/subnetworks"
        with skip_if_denied():
            found = self._services.get("compute", path, "list subnetworks") or {}
        own = self._options.subnetwork.rpartition("/")[2]
        return [
            one
            for one in found.get("items", [])
            if str(one["network"]).rpartition("/")[2] == self._network and own in ("", one["name"])
        ]

    @property
    def _network(self) -> str:
        return self._options.network.rpartition("/")[2] or "default"

    def _check_firewall(self) -> str:
        """Raise `ConfigError` if no firewall rule lets agents connect to each other."""
        subnetworks = self._subnetworks()
        path = f"/compute/v1/projects/{self._project}/global/firewalls"
        with skip_if_denied():
            found = self._services.get("compute", path, "list firewall rules") or {}
            account = self._service_account_email()
        is_open = network.is_open_between_agents(
            found.get("items", []),
            network=self._network,
            account=account,
            ranges=[str(one["ipCidrRange"]) for one in subnetworks],
        )
        if is_open is None:
            raise CheckSkippedError("only rules for network tags allow connections")
        if not is_open:
            raise ConfigError(
                f"No firewall rule of the network {self._network} lets machines with the service "
                f"account {account} connect to each other, so agents cannot reach each other.",
                do=f"`gcloud compute firewall-rules create spotfit-agents --network {self._network}"
                f" --allow tcp --source-service-accounts {account} "
                f"--target-service-accounts {account}`, or apply infra/terraform/stacks/gcp.",
            )
        return f"network {self._network}"

    def _check_routes(self) -> str:
        """Raise `ConfigError` if machines without public address have no access to Google's APIs.

        https://docs.cloud.google.com/vpc/docs/private-google-access
        """
        if self._options.external_ip:
            return "with external addresses"
        closed = [
            one["name"] for one in self._subnetworks() if not one.get("privateIpGoogleAccess")
        ]
        if closed:
            raise ConfigError(
                "GcpBatchOptions(external_ip=False) needs Private Google Access, which is disabled "
                f"in {', '.join(closed)}: machines could not reach the bucket and the registry.",
                do=f"`gcloud compute networks subnets update {closed[0]} --region "
                f"{self._options.region} --enable-private-ip-google-access`.",
            )
        return "by Private Google Access"

    def _check_gpu(self) -> str:
        """Raise `ConfigError` for GPUs that the CUDA version of a worker image does not support."""
        gpu = network.gpu_type(self._options.machine_type, self._options.accelerator)
        if not gpu:
            return "no GPUs are configured"
        # Tags of worker_image/bake.sh end with the kind of the image.
        if not images.is_cuda_image(self._options.image):
            raise CheckSkippedError("the name of the image does not tell its version of CUDA")
        if network.lacks_cuda_13(gpu):
            raise ConfigError(
                f"CUDA 13, with which the worker image is built, does not support {gpu}.",
                do="Choose a newer GPU, such as nvidia-tesla-t4 or nvidia-l4, or build an image "
                "with CUDA 12.",
            )
        return f"CUDA 13 supports {gpu}"

    def _check_bucket_location(self) -> str:
        """Raise `ConfigError` if the bucket is in another region."""
        path = f"/storage/v1/b/{quote(self._bucket, safe='')}?fields=location"
        with skip_if_denied():
            found = self._services.get("storage", path, "read the bucket")
        if found is None:
            raise ConfigError(
                f"The bucket {self._bucket} does not exist.", do="Create it, or correct --storage."
            )
        location = str(found.get("location", ""))
        if not network.bucket_serves_region(location, self._options.region):
            raise ConfigError(
                f"The bucket {self._bucket} is in {location}, but the machines are in "
                f"{self._options.region}; traffic between regions is slow and billed.",
                do="Use a bucket in the region of the machines.",
            )
        return location

    # --- regions and machines ----------------------------------------------------------------

    def _check_region(self) -> None:
        path = f"/v1/projects/{self._project}/locations/{self._options.region}"
        if self._services.get("batch", path, "read a location") is None:
            raise ConfigError(
                f"GcpBatchOptions(region={self._options.region!r}) is not a location of Google "
                "Cloud Batch.",
                do="Choose one of https://docs.cloud.google.com/batch/docs/locations.",
            )

    def _check_machines(self) -> str:
        """Return the zones. Raises `ConfigError` for missing zones, machine types or GPUs."""
        required = {
            "machineTypes": self._options.machine_type,
            "acceleratorTypes": self._options.accelerator,
        }
        with skip_if_denied():
            region = self._get_compute_resource(f"regions/{self._options.region}")
            # Compute Engine refers to zones by URL.
            available = [str(url).rpartition("/")[2] for url in (region or {}).get("zones", [])]
            do = "`gcloud compute zones list` lists all zones."
            if not available:
                raise ConfigError(
                    f"GcpBatchOptions(region={self._options.region!r}): the region does not exist.",
                    do=do,
                )
            if unknown := [zone for zone in self._options.zones if zone not in available]:
                raise ConfigError(
                    f"GcpBatchOptions(zones=…): the region {self._options.region} has no zone "
                    f"{', '.join(unknown)}.",
                    do=do,
                )
            zones = list(self._options.zones) or available
            for kind, name in required.items():
                # A zone must have both, so the zones are narrowed down.
                paths = {zone: f"zones/{zone}/{kind}/{name}" for zone in zones}
                zones = [z for z in zones if not name or self._get_compute_resource(paths[z])]
                if not zones:
                    raise ConfigError(
                        f"GcpBatchOptions(machine_type={self._options.machine_type!r}, accelerator="
                        f"{self._options.accelerator!r}): no allowed zone of "
                        f"{self._options.region} has them; {name} is missing in "
                        f"{', '.join(paths)}.",
                        do="Choose another zones=, region=, machine_type= or accelerator=: `gcloud "
                        "compute machine-types list` and `gcloud compute accelerator-types list` "
                        "show which zones have them.",
                    )
            return ", ".join(zones)

    def _get_compute_resource(self, name: str) -> dict[str, Any] | None:
        path = f"/compute/v1/projects/{self._project}/{name}"
        return self._services.get("compute", path, f"read {name}")

    # --- permissions -------------------------------------------------------------------------

    def _check_own_permissions(self, permissions: tuple[str, ...]) -> str:
        """Raise `ProvisionPermissionError` naming all missing permissions of the caller."""
        path = f"/v1/projects/{self._project}:testIamPermissions"
        return self._test_permissions(
            "cloudresourcemanager", path, permissions=permissions, subject="the caller"
        )

    def _check_service_account(self) -> str:
        """Raise an error if the service account is missing, or the caller may not use it."""
        with skip_if_denied():
            email = self._service_account_email()
        # '-' stands for the project, which the email address determines.
        path = f"/v1/projects/-/serviceAccounts/{quote(email)}:testIamPermissions"
        return self._test_permissions("iam", path, permissions=(ACT_AS_PERMISSION,), subject=email)

    def _service_account_email(self) -> str:
        """Return the agents' service account."""
        if self._options.service_account:
            return self._options.service_account
        # The name of Compute Engine's default account contains the project number.
        path = f"/v1/projects/{self._project}"
        project = self._services.get("cloudresourcemanager", path, "read the project") or {}
        return f"{project.get('projectNumber', '0')}-compute@developer.gserviceaccount.com"

    def _test_permissions(
        self, service: str, path: str, *, permissions: tuple[str, ...], subject: str
    ) -> str:
        body = {"permissions": list(permissions)}
        with skip_if_denied():
            response = self._services.post(
                service, path, body=body, action="test permissions (testIamPermissions)"
            )
        if response is None:
            # The subject is an email address, or 'the caller' of a test on the project.
            is_account = "@" in subject
            missing_name = (
                f"service account {subject}" if is_account else f"project {self._project}"
            )
            raise ConfigError(
                f"The {missing_name} does not exist.",
                do=f"Create the {missing_name}, or correct GcpBatchOptions("
                f"{'service_account' if is_account else 'project'}=…).",
            )
        missing = [name for name in permissions if name not in response.get("permissions", [])]
        if missing:
            resource = f" on {subject}" if "@" in subject else ""
            raise ProvisionPermissionError(
                "The account of your Google credentials lacks permissions in the project "
                f"{self._project}: "
                f"{', '.join(missing)}{resource}.",
                do=_REMEDY_ROLES,
            )
        return f"{subject}: {', '.join(permissions)}"

    def _check_agent_roles(self) -> str:
        """Return the roles that the project's policy grants directly to the service account.

        Missing roles are inconclusive: they may be granted to a group or by a custom role.
        """
        path = f"/v1/projects/{self._project}:getIamPolicy"
        with skip_if_denied():
            member = f"serviceAccount:{self._service_account_email()}"
            policy = self._services.post(
                "cloudresourcemanager", path, body={}, action="read the policy"
            )
        bindings = (policy or {}).get("bindings", [])
        roles = {binding["role"] for binding in bindings if member in binding.get("members", [])}
        missing = [role for role in AGENT_ROLES if role not in roles]
        if missing and roles.isdisjoint(_BROADER_ROLES):
            raise CheckSkippedError(
                f"the project's policy does not grant {', '.join(missing)} directly"
            )
        return ", ".join(sorted(roles))

    # --- image -------------------------------------------------------------------------------

    def _check_image(self) -> str:
        """Raise `ConfigError` if the image is missing. Checks only Artifact Registry."""
        image = self._options.image
        path = _artifact_registry_path(image)
        if path is None:
            raise CheckSkippedError(
                f"GcpBatchOptions(image={image!r}) is in another registry; only images in Artifact "
                "Registry (*-docker.pkg.dev) can be checked"
            )
        with skip_if_denied():
            found = self._services.get("artifactregistry", path, "read an image")
        if found is None:
            raise ConfigError(
                f"GcpBatchOptions(image={image!r}): the registry does not contain this image.",
                do="Build and push it with worker_image/bake.sh, or correct the name.",
            )
        return image


def _artifact_registry_path(image: str) -> str | None:
    """Return the API path of 'us-docker.pkg.dev/project/repository/name:tag'; None for others."""
    host, _, rest = image.partition("/")
    parts = rest.split("/", 2)
    if not host.endswith("-docker.pkg.dev") or len(parts) < 3:
        return None
    project, repository, name = parts
    location = host.removesuffix("-docker.pkg.dev")
    # Slashes of a nested image name are escaped: it is one segment of the resource path.
    base = f"/v1/projects/{project}/locations/{location}/repositories/{repository}/packages/"
    name, _, digest = name.partition("@")
    name, _, tag = name.partition(":")
    version = f"versions/{digest}" if digest else f"tags/{tag or 'latest'}"
    return f"{base}{quote(name, safe='')}/{version}"
