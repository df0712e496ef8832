"""What Azure Batch needs in a subscription, looked at one by one, and how to mend what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

from spotfit.core.errors import (
    ConfigError,
    ProvisionError,
    ProvisionPermissionError,
    QuotaError,
)
from spotfit.provision.checkup import Finding, UnseenError, look, unseen_if_refused
from spotfit_provisioners.azure_batch import render
from spotfit_provisioners.azure_batch.client import BatchClient, Management
from spotfit_provisioners.azure_batch.options import AzureBatchOptions

NO_POOL = (
    "Make it as docs/guides/azure_batch.md shows, or set account_id, vm_size and identity: then it "
    "is made when it is needed."
)
_BATCH = "2024-07-01"
_IDENTITY = "2023-01-31"
_RIGHTS = "2022-04-01"
_NO_ACCOUNT = "no account_id given: Resource Manager cannot be asked"
_GRANT = "Grant the roles that docs/guides/azure_batch.md lists."
_MORE = "Ask for more under Batch accounts → Quotas, or take smaller machines."

_RENTS = ("Microsoft.Batch/batchAccounts/jobs/read", "Microsoft.Batch/batchAccounts/jobs/write")
"""Rights on data: what 'Azure Batch Job Submitter' gives."""
_SEES_POOLS = "Microsoft.Batch/batchAccounts/pools/read"
_MAKES_POOLS = "Microsoft.Batch/batchAccounts/pools/write"
_GIVES_IDENTITY = "Microsoft.ManagedIdentity/userAssignedIdentities/assign/action"


def examine(options: AzureBatchOptions, open_: Callable[[], BatchClient]) -> Iterator[Finding]:
    """Everything, whether or not the account answers: Resource Manager is asked as well."""
    examiner = _Examiner(options, open_)
    yield look(f"jobs can be listed at {options.endpoint}", lambda: open_().look_around())
    yield look("there is a pool of spot nodes that scales to zero", examiner.pool)
    yield look("the pool gets what it asks for", examiner.growth)
    yield look("the account is the one that answers", examiner.account)
    yield look("quotas leave room for a spot node", examiner.quotas)
    yield look("the identity of the nodes is there", examiner.identity)
    yield look("we may rent machines", examiner.rights)


class _Examiner:
    """Each question apart. What is wrong is raised, and `UnseenError` what cannot be looked at."""

    def __init__(self, options: AzureBatchOptions, open_: Callable[[], BatchClient]) -> None:
        self._options = options
        self._open = open_
        self._management = Management(options.management)

    # --- the pool ----------------------------------------------------------------------------

    def pool(self) -> str:
        """What the pool is like. Raises `ConfigError` for what would keep groups waiting, or cost
        too much."""
        pool_id = render.pool_id(self._options)
        pool = self._open().pool(pool_id)
        if pool is None:
            if self._options.makes_pool:
                return f"{pool_id} will be made"
            raise ConfigError(f"There is no pool {pool_id!r}.", do=NO_POOL)
        wrong = [what for what, well in _wishes(pool, self._options) if not well]
        if wrong:
            raise ConfigError(
                f"The pool {pool_id} {', '.join(wrong)}.",
                do="Make another one; docs/guides/azure_batch.md shows how.",
            )
        return f"{pool_id}: {pool['vmSize']}, {pool.get('currentLowPriorityNodes', 0)} nodes now"

    def growth(self) -> str:
        """Raises `ProvisionError` for what kept it from growing the last time."""
        pool = self._open().pool(render.pool_id(self._options))
        if pool is None:
            return "it is not there yet"
        errors = [*(pool.get("resizeErrors") or [])]
        if error := (pool.get("autoScaleRun") or {}).get("error"):
            errors.append(error)
        if errors:
            told = "; ".join(f"{one.get('code')}: {one.get('message')}" for one in errors)
            raise ProvisionError(told, do=f"{_MORE} Lack of capacity passes; quotas do not.")
        return f"{pool.get('targetLowPriorityNodes', 0)} spot nodes wanted now"

    # --- the account -------------------------------------------------------------------------

    def account(self) -> str:
        """Raises `ConfigError` for an account that is not there, not whole or another one."""
        found = self._account()
        properties = found["properties"]
        told, ours = properties.get("accountEndpoint", ""), urlsplit(self._options.endpoint)
        if ours.scheme == "https" and told and ours.netloc.lower() != told.lower():
            raise ConfigError(
                f"account_id is that of {told}, and endpoint says {ours.netloc}.",
                do="Correct one of AzureBatchOptions(endpoint=…, account_id=…).",
            )
        if (state := properties.get("provisioningState", "Succeeded")) != "Succeeded":
            raise ConfigError(f"The account is {state}.", do="Wait, or make it again.")
        return f"{found['name']} in {found.get('location', 'nowhere')}"

    def quotas(self) -> str:
        """Raises `QuotaError` for all that leave no room for one machine."""
        found = self._account()
        properties = found["properties"]
        if properties.get("poolAllocationMode") == "UserSubscription":
            raise UnseenError("the account's machines count against the subscription's own quotas")
        cores = self._cores(str(found.get("location", "")))
        spot = int(properties.get("lowPriorityCoreQuota") or 0)
        machine = self._options.vm_size or "a machine"
        limits = {
            f"{spot} spot cores, and {machine} has {cores}": spot >= cores,
            "no pools": properties.get("poolQuota", 1) > 0,
            "no active jobs": properties.get("activeJobAndJobScheduleQuota", 1) > 0,
        }
        if short := [what for what, enough in limits.items() if not enough]:
            raise QuotaError(f"The account may have {'; '.join(short)}.", do=_MORE)
        return f"{spot} spot cores: {spot // cores} machines"

    def _cores(self, location: str) -> int:
        """Of a machine, 1 at least: who is not told must not say that there is no room."""
        subscription = "/".join(self._options.account_id.split("/")[:3])
        path = f"{subscription}/providers/Microsoft.Batch/locations/{location}/virtualMachineSkus"
        wanted = self._options.vm_size.lower()
        try:
            for sku in self._management.listed(path, _BATCH, "look at machine sizes"):
                if sku["name"].lower() == wanted:
                    return _capability(sku, "vCPUs")
        except ProvisionError:
            return 1
        return 1

    def _account(self) -> dict[str, Any]:
        path = self._options.account_id
        if not path:
            raise UnseenError(_NO_ACCOUNT)
        with unseen_if_refused():
            found = self._management.get(path, _BATCH, "look at the Batch account")
        if found is None:
            raise ConfigError(f"There is no {path}.", do="Correct account_id, or make the account.")
        return found

    # --- who agents are, and what we may -----------------------------------------------------

    def identity(self) -> str:
        """Raises `ConfigError` for one that is not there, or whose client id is another."""
        path, client_id = self._options.identity, self._options.identity_client_id
        if not path:
            raise UnseenError("no identity given: nodes have that of their pool")
        with unseen_if_refused():
            found = self._management.get(path, _IDENTITY, "look at the identity")
        if found is None:
            raise ConfigError(f"There is no {path}.", do="Correct identity, or make it.")
        told = found["properties"].get("clientId", "")
        if client_id and client_id.lower() != told.lower():
            raise ConfigError(
                f"Its client id is {told}, and identity_client_id says {client_id}.",
                do=f"Set AzureBatchOptions(identity_client_id={told!r}).",
            )
        return f"{path.rpartition('/')[2]}, client {told}"

    def rights(self) -> str:
        """Raises `ProvisionPermissionError` for all that we lack."""
        account, identity = self._options.account_id, self._options.identity
        if not account:
            raise UnseenError(_NO_ACCOUNT)
        makes = self._options.makes_pool
        pools = (_SEES_POOLS, *((_MAKES_POOLS,) if makes else ()))
        with unseen_if_refused():
            lacking = [*_lacking(self._granted(account), pools, _RENTS)]
            if makes:
                lacking += _lacking(self._granted(identity), (_GIVES_IDENTITY,), ())
        if lacking:
            raise ProvisionPermissionError(f"We lack {', '.join(lacking)}.", do=_GRANT)
        return f"{len(pools) + len(_RENTS) + makes} rights"

    def _granted(self, scope: str) -> list[dict[str, Any]]:
        path = f"{scope.rstrip('/')}/providers/Microsoft.Authorization/permissions"
        return list(self._management.listed(path, _RIGHTS, "ask what we may do"))


def _wishes(pool: Mapping[str, Any], options: AzureBatchOptions) -> Iterator[tuple[str, bool]]:
    """What is wrong with a pool, and whether it is not."""
    system = pool.get("virtualMachineConfiguration") or {}
    formula = pool.get("autoScaleFormula", "")
    yield "does not scale itself", bool(pool.get("enableAutoScale"))
    yield "has a formula without $TargetLowPriorityNodes", "$TargetLowPriorityNodes" in formula
    yield "does not let nodes reach each other", bool(pool.get("enableInterNodeCommunication"))
    yield "puts several tasks on a node", pool.get("taskSlotsPerNode", 1) == 1
    yield "runs no containers", bool(system.get("containerConfiguration"))
    yield "gives its nodes no identity", bool(pool.get("identity"))
    yield f"does not give its nodes {options.identity}", _is_given(pool, options.identity)


def _is_given(pool: Mapping[str, Any], identity: str) -> bool:
    """Whether nodes have it; one without any is told of elsewhere."""
    given = (pool.get("identity") or {}).get("userAssignedIdentities") or []
    names = [str(one.get("resourceId", "")).lower() for one in given]
    return not identity or not names or identity.lower() in names


def _capability(sku: Mapping[str, Any], name: str) -> int:
    values = (one["value"] for one in sku.get("capabilities", []) if one["name"] == name)
    return max(1, int(next(values, 1)))


def _lacking(
    granted: Iterable[Mapping[str, Any]], actions: Sequence[str], on_data: Sequence[str]
) -> Iterator[str]:
    """Which of these no role of ours gives: https://learn.microsoft.com/azure/role-based-access-control/role-definitions."""
    roles = list(granted)
    for action in actions:
        if not any(_gives(role, action, "actions", "notActions") for role in roles):
            yield action
    for action in on_data:
        if not any(_gives(role, action, "dataActions", "notDataActions") for role in roles):
            yield action


def _gives(role: Mapping[str, Any], action: str, named: str, but: str) -> bool:
    return _matches(action, role.get(named) or []) and not _matches(action, role.get(but) or [])


def _matches(action: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(action.lower(), pattern.lower()) for pattern in patterns)
