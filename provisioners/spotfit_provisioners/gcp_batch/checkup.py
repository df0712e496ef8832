"""What Google Cloud Batch needs in a project, looked at one by one, and how to mend what is wrong.

Rights are asked of Google itself (`testIamPermissions`), which tells everybody of their own only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

from spotfit.core.errors import ConfigError, ProvisionPermissionError
from spotfit.provision.checkup import Finding, UnseenError, look, unseen_if_refused
from spotfit_provisioners.gcp_batch.client import BatchClient, Services
from spotfit_provisioners.gcp_batch.options import GcpBatchOptions

RENTS = (
    "batch.jobs.create",
    "batch.jobs.delete",
    "batch.jobs.get",
    "batch.jobs.list",
    "batch.tasks.list",
)
"""What roles/batch.jobsEditor gives. To cancel a job is a right to delete."""
READS_LOGS = "logging.logEntries.list"
ACTS_AS = "iam.serviceAccounts.actAs"
AGENTS_ROLES = ("roles/batch.agentReporter", "roles/batch.jobsEditor")
"""The first lets Batch's own agent report from the VM: without it no task ever starts."""
_BROADER = ("roles/owner", "roles/editor", "roles/batch.admin")
_GRANT = "Grant the roles that docs/guides/gcp_batch.md lists, or apply infra/terraform/stacks/gcp."


def examine(options: GcpBatchOptions, open_: Callable[[], BatchClient]) -> Iterator[Finding]:
    """Everything; nothing but who asks, where that is not known."""
    opened: list[BatchClient] = []

    def ask() -> str:
        opened.append(open_())
        return f"project {opened[-1].project}"

    yield look("Google knows who asks", ask)
    for client in opened:
        yield look(f"jobs can be listed in {options.region}", client.look_around)
        yield from _Examiner(options, client).rest()


class _Examiner:
    """What there is to look at once it is known who asks."""

    def __init__(self, options: GcpBatchOptions, client: BatchClient) -> None:
        self._options = options
        self._project = client.project
        self._services = Services(options.endpoint)

    def rest(self) -> Iterator[Finding]:
        options = self._options
        yield look(f"Batch is at home in {options.region}", self._region)
        yield look("its machines are to be had there", self._machines)
        yield look("we may rent machines", lambda: self._ours(RENTS))
        yield look("we may read what machines print", lambda: self._ours((READS_LOGS,)))
        yield look("agents may be who they are to be", self._account)
        yield look("agents may do what they must", self._agents)
        yield look("the image is there", self._image)

    # --- places ------------------------------------------------------------------------------

    def _region(self) -> None:
        where = f"/v1/projects/{self._project}/locations/{self._options.region}"
        if self._services.get("batch", where, "look at a location") is None:
            raise ConfigError(
                f"Google Cloud Batch has no location {self._options.region!r}.",
                do="Its locations are listed at "
                "https://docs.cloud.google.com/batch/docs/locations.",
            )

    def _machines(self) -> str:
        """In which zones. Raises `ConfigError` for zones, machines or GPUs that are not there."""
        with unseen_if_refused():
            return self._found_in(self._zones())

    def _zones(self) -> list[str]:
        region = self._compute(f"regions/{self._options.region}")
        there = [str(url).rpartition("/")[2] for url in (region or {}).get("zones", [])]
        strange = [zone for zone in self._options.zones if zone not in there]
        do = "`gcloud compute zones list` tells all there are."
        if not there:
            raise ConfigError(f"There is no region {self._options.region}.", do=do)
        if strange:
            raise ConfigError(
                f"The region {self._options.region} has no zone {', '.join(strange)}.", do=do
            )
        return list(self._options.zones) or there

    def _found_in(self, zones: list[str]) -> str:
        wanted = {
            "machineTypes": self._options.machine_type,
            "acceleratorTypes": self._options.accelerator,
        }
        for kind, name in wanted.items():
            if name:
                zones = [zone for zone in zones if self._compute(f"zones/{zone}/{kind}/{name}")]
            if not zones:
                raise ConfigError(
                    f"No zone that may be used has {name}.",
                    do="`gcloud compute machine-types list` and `… accelerator-types list` tell "
                    "where there are any.",
                )
        return ", ".join(zones)

    def _compute(self, what: str) -> dict[str, Any] | None:
        path = f"/compute/v1/projects/{self._project}/{what}"
        return self._services.get("compute", path, f"look at {what}")

    # --- rights ------------------------------------------------------------------------------

    def _ours(self, rights: tuple[str, ...]) -> str:
        """Raises `ProvisionPermissionError` for all that we lack."""
        path = f"/v1/projects/{self._project}:testIamPermissions"
        return self._tested("cloudresourcemanager", path, rights, "whoever asks")

    def _account(self) -> str:
        """Raises for a service account that is not there, or that we may not hand to agents."""
        with unseen_if_refused():
            email = self._email()
        path = f"/v1/projects/-/serviceAccounts/{quote(email)}:testIamPermissions"
        return self._tested("iam", path, (ACTS_AS,), email)

    def _email(self) -> str:
        """Of the agents; Compute Engine's default account has the project's number in its name."""
        if self._options.service_account:
            return self._options.service_account
        path = f"/v1/projects/{self._project}"
        told = self._services.get("cloudresourcemanager", path, "look at the project") or {}
        return f"{told.get('projectNumber', '0')}-compute@developer.gserviceaccount.com"

    def _tested(self, service: str, path: str, rights: tuple[str, ...], whom: str) -> str:
        what = "ask what we may do (testIamPermissions)"
        with unseen_if_refused():
            told = self._services.post(service, path, {"permissions": list(rights)}, what)
        if told is None:
            raise ConfigError(
                f"There is no {whom}.", do="Correct GcpBatchOptions(service_account=…), or make it."
            )
        lacking = [right for right in rights if right not in told.get("permissions", [])]
        if lacking:
            about = f" on {whom}" if "@" in whom else ""
            raise ProvisionPermissionError(f"We lack {', '.join(lacking)}{about}.", do=_GRANT)
        return f"{whom}: {', '.join(rights)}"

    def _agents(self) -> str:
        """The roles that the project's policy gives them by name. Groups and roles of one's own
        are not looked into: what is missing here may come from there."""
        path = f"/v1/projects/{self._project}:getIamPolicy"
        with unseen_if_refused():
            member = f"serviceAccount:{self._email()}"
            told = self._services.post("cloudresourcemanager", path, {}, "read the policy") or {}
        bindings = told.get("bindings", [])
        roles = {one["role"] for one in bindings if member in one.get("members", [])}
        missing = [role for role in AGENTS_ROLES if role not in roles]
        if missing and roles.isdisjoint(_BROADER):
            raise UnseenError(
                f"the project's policy does not give them {', '.join(missing)} by name"
            )
        return ", ".join(sorted(roles))

    # --- the image ---------------------------------------------------------------------------

    def _image(self) -> str:
        """Looks into Artifact Registry only. Raises `ConfigError` for an image not there."""
        image = self._options.image
        path = _in_registry(image)
        if path is None:
            raise UnseenError(f"{image} is not in Artifact Registry")
        with unseen_if_refused():
            found = self._services.get("artifactregistry", path, "look at images")
        if found is None:
            raise ConfigError(
                f"The registry has no {image}.",
                do="worker_image/bake.sh makes and pushes one; or correct the name.",
            )
        return image


def _in_registry(image: str) -> str | None:
    """Where Artifact Registry tells of 'us-docker.pkg.dev/project/repository/name:tag'."""
    host, _, rest = image.partition("/")
    parts = rest.split("/", 2)
    if not host.endswith("-docker.pkg.dev") or len(parts) < 3:
        return None
    project, repository, name = parts
    place = host.removesuffix("-docker.pkg.dev")
    base = f"/v1/projects/{project}/locations/{place}/repositories/{repository}/packages/"
    name, _, digest = name.partition("@")
    name, _, tag = name.partition(":")
    which = f"versions/{digest}" if digest else f"tags/{tag or 'latest'}"
    return f"{base}{quote(name, safe='')}/{which}"
