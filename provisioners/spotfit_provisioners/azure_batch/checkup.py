"""Account checks of the Azure Batch backend."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

from spotfit.core.errors import ConfigError, ProvisionError, ProvisionPermissionError, QuotaError
from spotfit.model.offer import Market
from spotfit.provision.api import AccountCheck, CheckSkippedError, run_check, skip_if_denied
from spotfit_provisioners.azure_batch import render
from spotfit_provisioners.azure_batch.client import AzureBatchClient, AzureResourceManagerClient
from spotfit_provisioners.azure_batch.options import AzureBatchOptions

REMEDY_NO_POOL = (
    "Correct AzureBatchOptions(pool=…), or create the pool as docs/guides/azure_batch.md shows, or "
    "set account_id, vm_size and identity so that spotfit creates it."
)
# Older versions are announced to be retired: https://github.com/Azure/Batch/issues/140
_BATCH_API_VERSION = "2025-06-01"
_IDENTITY_API_VERSION = "2023-01-31"
_PERMISSIONS_API_VERSION = "2022-04-01"
_NO_ACCOUNT = "account_id is not set, so Azure Resource Manager cannot be queried"
_REMEDY_ROLES = "Grant this account the roles that docs/guides/azure_batch.md lists."
_REMEDY_QUOTA = (
    "Request a higher quota under Batch accounts → Quotas. If spot cores are missing, a smaller "
    "AzureBatchOptions(vm_size=…) also helps."
)

# Data actions of the role 'Azure Batch Job Submitter'.
_JOB_DATA_ACTIONS = (
    "Microsoft.Batch/batchAccounts/jobs/read",
    "Microsoft.Batch/batchAccounts/jobs/write",
)
_READ_POOLS_ACTION = "Microsoft.Batch/batchAccounts/pools/read"
_WRITE_POOLS_ACTION = "Microsoft.Batch/batchAccounts/pools/write"
_ASSIGN_IDENTITY_ACTION = "Microsoft.ManagedIdentity/userAssignedIdentities/assign/action"


def check_account(
    options: AzureBatchOptions, open_client: Callable[[], AzureBatchClient]
) -> Iterator[AccountCheck]:
    """Run all checks. Most use Resource Manager, also if the Batch account does not answer."""
    checks = _AzureAccountChecks(options, open_client)
    yield run_check(
        f"jobs can be listed at {options.endpoint}", lambda: open_client().check_access()
    )
    yield run_check("the pool has spot nodes and scales to zero", checks.check_pool)
    if options.on_demand_pool:
        yield run_check(
            "the on-demand pool has dedicated nodes and scales to zero",
            lambda: checks.check_pool(Market.ON_DEMAND),
        )
    yield run_check("the pool can grow", checks.check_pool_growth)
    yield run_check("account_id and endpoint are the same account", checks.check_batch_account)
    yield run_check("quotas allow a spot node", checks.check_quotas)
    yield run_check("the identity of the nodes exists", checks.check_identity)
    yield run_check("the caller may rent machines", checks.check_permissions)


class _AzureAccountChecks:
    """Independent checks; each raises the error that it finds, or `CheckSkippedError`."""

    def __init__(
        self, options: AzureBatchOptions, open_client: Callable[[], AzureBatchClient]
    ) -> None:
        self._options = options
        self._open_client = open_client
        self._management = AzureResourceManagerClient(options.management_endpoint)

    # --- pool --------------------------------------------------------------------------------

    def check_pool(self, market: Market = Market.SPOT) -> str:
        """Raise `ConfigError` if groups would wait indefinitely, or nodes would stay rented."""
        pool_id = render.pool_id(self._options, market)
        is_spot = market is Market.SPOT
        target = "$TargetLowPriorityNodes" if is_spot else "$TargetDedicatedNodes"
        pool = self._open_client().find_pool(pool_id)
        if pool is None:
            if self._options.can_create_pool:
                return f"{pool_id} will be created"
            raise ConfigError(f"The Batch pool {pool_id!r} does not exist.", do=REMEDY_NO_POOL)
        machines = pool.get("virtualMachineConfiguration") or {}
        formula = pool.get("autoScaleFormula", "")
        scales = target in formula and not re.search(rf"{re.escape(target)}\s*=\s*0\s*;", formula)
        assigned = (pool.get("identity") or {}).get("userAssignedIdentities") or []
        identities = [str(entry.get("resourceId", "")).lower() for entry in assigned]
        identity = self._options.identity
        # Resource ids are case-insensitive. A pool without identities is a problem of its own.
        has_identity = not identity or not identities or identity.lower() in identities
        conditions = {
            "has no autoscaling": pool.get("enableAutoScale"),
            f"has a formula without {target} above 0": scales,
            "has no inter-node communication": pool.get("enableInterNodeCommunication"),
            "runs several tasks on a node": pool.get("taskSlotsPerNode", 1) == 1,
            "does not run containers": machines.get("containerConfiguration"),
            "assigns no identity to its nodes": pool.get("identity"),
            f"does not assign {identity} to its nodes": has_identity,
        }
        if problems := [text for text, holds in conditions.items() if not holds]:
            raise ConfigError(
                f"The Batch pool {pool_id} {', '.join(problems)}.",
                do="Create another pool as docs/guides/azure_batch.md shows.",
            )
        count = pool.get("currentLowPriorityNodes" if is_spot else "currentDedicatedNodes", 0)
        return f"{pool_id}: {pool['vmSize']}, {count} nodes now"

    def check_pool_growth(self) -> str:
        """Raise `ProvisionError` if the last resize of the pool failed."""
        pool = self._open_client().find_pool(render.pool_id(self._options))
        if pool is None:
            return "the pool does not exist yet"
        errors = [*(pool.get("resizeErrors") or [])]
        if error := (pool.get("autoScaleRun") or {}).get("error"):
            errors.append(error)
        if errors:
            text = "; ".join(f"{error.get('code')}: {error.get('message')}" for error in errors)
            raise ProvisionError(
                f"The last resize of the Batch pool {render.pool_id(self._options)} failed: {text}",
                do=f"{_REMEDY_QUOTA} A lack of capacity is temporary; quotas are not.",
            )
        return f"the target is {pool.get('targetLowPriorityNodes', 0)} spot nodes"

    # --- account -----------------------------------------------------------------------------

    def check_batch_account(self) -> str:
        """Raise `ConfigError` if the account is missing, not ready, or not that of `endpoint`."""
        found = self._find_account()
        properties = found["properties"]
        actual, endpoint = properties.get("accountEndpoint", ""), urlsplit(self._options.endpoint)
        if endpoint.scheme == "https" and actual and endpoint.netloc.lower() != actual.lower():
            raise ConfigError(
                f"AzureBatchOptions: account_id is the account of {actual}, but endpoint is "
                f"{endpoint.netloc}.",
                do=f"Set endpoint='https://{actual}', or correct account_id.",
            )
        if (state := properties.get("provisioningState", "Succeeded")) != "Succeeded":
            raise ConfigError(
                f"The Batch account {self._options.account_id} is not ready: its provisioning "
                f"state is {state}.",
                do="Wait until the state is Succeeded. If the state is Failed, create the account "
                "again.",
            )
        return f"{found['name']} in {found.get('location', 'an unknown location')}"

    def check_quotas(self) -> str:
        """Raise `QuotaError` if the quotas do not allow one machine."""
        found = self._find_account()
        properties = found["properties"]
        if properties.get("poolAllocationMode") == "UserSubscription":
            raise CheckSkippedError(
                "the account's machines count against the quotas of the subscription"
            )
        # Azure's API names spot nodes 'low-priority'; the quota counts the cores of both.
        cores = self._cores_per_machine(str(found.get("location", "")))
        spot = int(properties.get("lowPriorityCoreQuota") or 0)
        machine = self._options.vm_size or "a machine"
        limits = {
            f"{spot} spot cores, but {machine} has {cores}": spot >= cores,
            "no pools": properties.get("poolQuota", 1) > 0,
            "no active jobs": properties.get("activeJobAndJobScheduleQuota", 1) > 0,
        }
        if exceeded := [limit for limit, suffices in limits.items() if not suffices]:
            raise QuotaError(
                f"The quota of the Batch account of AzureBatchOptions is {'; '.join(exceeded)}.",
                do=_REMEDY_QUOTA,
            )
        # Which families have dedicated cores is a matter of other quotas.
        dedicated = int(properties.get("dedicatedCoreQuota") or 0)
        return (
            f"{spot} spot cores: {spot // cores} machines; {dedicated} dedicated cores: "
            f"{dedicated // cores} on-demand machines"
        )

    def _cores_per_machine(self, location: str) -> int:
        """Return the cores of `vm_size`; 1 if unknown, so that the quota check does not fail."""
        subscription = "/".join(self._options.account_id.split("/")[:3])
        path = f"{subscription}/providers/Microsoft.Batch/locations/{location}/virtualMachineSkus"
        vm_size = self._options.vm_size.lower()
        try:
            for sku in self._management.list_resources(
                path, _BATCH_API_VERSION, "list machine sizes"
            ):
                if sku["name"].lower() == vm_size:
                    values = {
                        one["name"]: one.get("value", 1) for one in sku.get("capabilities", [])
                    }
                    return max(1, int(values.get("vCPUs", 1)))
        except ProvisionError:  # the caller may not read it; the other quotas are still checked
            return 1
        return 1

    def _find_account(self) -> dict[str, Any]:
        path = self._options.account_id
        if not path:
            raise CheckSkippedError(_NO_ACCOUNT)
        with skip_if_denied():
            found = self._management.get(path, _BATCH_API_VERSION, "read the Batch account")
        if found is None:
            raise ConfigError(
                f"The Batch account {path} does not exist.",
                do="Correct AzureBatchOptions(account_id=…), or create the account.",
            )
        return found

    # --- identity and permissions ------------------------------------------------------------

    def check_identity(self) -> str:
        """Raise `ConfigError` if the identity is missing, or has another client id."""
        path, client_id = self._options.identity, self._options.identity_client_id
        if not path:
            raise CheckSkippedError("identity is not set: nodes have the identity of their pool")
        with skip_if_denied():
            found = self._management.get(path, _IDENTITY_API_VERSION, "read the identity")
        if found is None:
            raise ConfigError(
                f"The managed identity {path} does not exist.",
                do="Correct AzureBatchOptions(identity=…), or create the identity.",
            )
        actual = found["properties"].get("clientId", "")
        if client_id and client_id.lower() != actual.lower():
            raise ConfigError(
                f"AzureBatchOptions(identity_client_id={client_id!r}) is not the client id of "
                f"{path}, which is {actual}.",
                do=f"Set AzureBatchOptions(identity_client_id={actual!r}).",
            )
        return f"{path.rpartition('/')[2]}, client {actual}"

    def check_permissions(self) -> str:
        """Raise `ProvisionPermissionError` naming all missing permissions."""
        account, identity = self._options.account_id, self._options.identity
        if not account:
            raise CheckSkippedError(_NO_ACCOUNT)
        creates_pool = self._options.can_create_pool
        pools = (_READ_POOLS_ACTION, *((_WRITE_POOLS_ACTION,) if creates_pool else ()))
        with skip_if_denied():
            missing = [
                *_missing_actions(self._list_granted_roles(account), pools, _JOB_DATA_ACTIONS)
            ]
            if creates_pool:
                missing += _missing_actions(
                    self._list_granted_roles(identity), (_ASSIGN_IDENTITY_ACTION,), ()
                )
        if missing:
            raise ProvisionPermissionError(
                "The account of your Azure credentials lacks permissions on the Batch account or "
                "identity: "
                f"{', '.join(missing)}.",
                do=_REMEDY_ROLES,
            )
        return f"{len(pools) + len(_JOB_DATA_ACTIONS) + creates_pool} permissions"

    def _list_granted_roles(self, scope: str) -> list[dict[str, Any]]:
        path = f"{scope.rstrip('/')}/providers/Microsoft.Authorization/permissions"
        return list(
            self._management.list_resources(path, _PERMISSIONS_API_VERSION, "list permissions")
        )


def _missing_actions(
    granted: Iterable[Mapping[str, Any]], actions: Sequence[str], data_actions: Sequence[str]
) -> Iterator[str]:
    """Yield the actions that no granted role allows.

    https://learn.microsoft.com/azure/role-based-access-control/role-definitions
    """
    roles = list(granted)
    for action in actions:
        if not any(_grants(role, action, "actions", "notActions") for role in roles):
            yield action
    for action in data_actions:
        if not any(_grants(role, action, "dataActions", "notDataActions") for role in roles):
            yield action


def _grants(role: Mapping[str, Any], action: str, *fields: str) -> bool:
    # An exclusion limits its own role only: another role may still grant the action.
    is_allowed, is_excluded = (
        any(fnmatchcase(action.lower(), pattern.lower()) for pattern in role.get(field) or [])
        for field in fields
    )
    return is_allowed and not is_excluded
