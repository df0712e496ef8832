"""Account checks of the Slurm backend: partitions, accounting, submission and time limits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from spotfit.core.errors import ConfigError, ProvisionPermissionError
from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market, Offer
from spotfit.provision.api import AccountCheck, CheckSkippedError, run_check
from spotfit_provisioners.slurm import offers, render
from spotfit_provisioners.slurm.client import SlurmClient
from spotfit_provisioners.slurm.options import SlurmOptions

# How scontrol prints a list that permits everything.
_UNRESTRICTED = ("", "ALL", "(null)")


def check_account(options: SlurmOptions, slurm: SlurmClient) -> Iterator[AccountCheck]:
    """Run all checks; if the controller does not answer, only the first one."""
    answers = run_check(
        "the controller answers",
        lambda: slurm.read_cluster_config()["ClusterName"],
        do="`scontrol ping` shows the state of the controllers.",
    )
    yield answers
    if answers.passed:
        yield from _SlurmChecks(options, slurm).run()


class _SlurmChecks:
    """Checks that query the controller."""

    def __init__(self, options: SlurmOptions, slurm: SlurmClient) -> None:
        self._options = options
        self._slurm = slurm
        self._cluster_config = slurm.read_cluster_config()

    def run(self) -> Iterator[AccountCheck]:
        for name in self._options.partitions or ("",):
            partition = f"the partition {name}" if name else "the default partition"
            yield run_check(
                f"{partition} accepts jobs",
                lambda n=name: self._check_partition(n),  # type: ignore[misc]
            )
            yield run_check(
                f"{partition} requeues preempted tasks",
                lambda n=name: self._check_requeue(n),  # type: ignore[misc]
            )
        yield run_check("the account can be charged", self._check_association)
        yield run_check("a job is accepted", self._check_submission)
        for offer in self._on_demand_offers():
            yield run_check(
                f"the offer {offer.name} is accepted",
                lambda one=offer: self._check_on_demand(one),  # type: ignore[misc]
            )
        yield run_check("the grace period is long enough", self._check_kill_wait)
        yield run_check("tasks can write to the working directory", self._check_work_dir)

    # --- partitions --------------------------------------------------------------------------

    def _check_partition(self, name: str) -> str:
        """Raise `ConfigError` naming all reasons why the partition rejects jobs."""
        partition = self._find_partition(name)
        if problems := [text for text, holds in self._access_conditions(partition) if not holds]:
            raise ConfigError(
                f"The partition {name or '(default)'} {', '.join(problems)}.",
                do="Choose another partition with SlurmOptions(partitions=…, account=…, qos=…); "
                "`sinfo` and `scontrol show partition` list them.",
            )
        return f"{partition.get('TotalNodes', '?')} nodes, up to {partition.get('MaxTime', '?')}"

    def _find_partition(self, name: str) -> Mapping[str, str]:
        partition = self._slurm.find_partition(name)
        if not partition:
            raise ConfigError(
                f"SlurmOptions(partitions=…) names {name!r}, which does not exist in the cluster."
                if name
                else "SlurmOptions(partitions=…) is not set, and the cluster has no default one.",
                do="Set SlurmOptions(partitions=…); `sinfo` lists all partitions.",
            )
        return partition

    def _access_conditions(self, partition: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
        """Yield the text of each possible problem, and whether the partition is free of it."""
        account, qos = self._options.account, self._options.qos
        yield f"is {partition.get('State')}", partition.get("State") == "UP"
        yield "is for root only", partition.get("RootOnly") != "YES" or os.getuid() == 0
        yield (
            f"allows only the groups {partition.get('AllowGroups')}",
            _is_unrestricted(partition, "AllowGroups")
            or bool(set(self._slurm.list_own_groups()) & _split_names(partition, "AllowGroups")),
        )
        yield (
            f"does not allow the account {account}",
            _is_allowed(partition, "Accounts", name=account),
        )
        yield f"does not allow the QOS {qos}", _is_allowed(partition, "Qos", name=qos)

    def _check_requeue(self, name: str) -> str:
        """Raise `ConfigError` if preempted tasks are suspended.

        A suspended worker neither answers nor fails, so it would block the whole group.
        """
        # With preemption by QOS, the cluster's mode applies; that of partitions may be OFF.
        mode = self._find_partition(name).get("PreemptMode", "")
        if mode == "OFF" and self._cluster_config.get("PreemptType", "").endswith("qos"):
            mode = self._cluster_config.get("PreemptMode", "")
        if "SUSPEND" in mode or "GANG" in mode:
            raise ConfigError(
                f"PreemptMode of the partition {name or '(default)'} is {mode}: preempted tasks "
                "are suspended, and the whole group would wait for them.",
                do="Ask the administrators for PreemptMode=REQUEUE, or choose another partition.",
            )
        effects = {"REQUEUE": "Slurm requeues the task", "OFF": "no preemption"}
        return f"PreemptMode {mode}: {effects.get(mode, 'the run requests a replacement')}"

    # --- accounting and submission -----------------------------------------------------------

    def _check_association(self) -> str:
        """Raise `ProvisionPermissionError` for an account or QOS that the user may not use."""
        if not self._cluster_config.get("AccountingStorageType", "").endswith("slurmdbd"):
            return "the cluster has no accounting"
        if "associations" not in self._cluster_config.get("AccountingStorageEnforce", "").lower():
            return "the cluster does not enforce associations"
        associations = self._slurm.list_associations()
        account, qos = self._options.account, self._options.qos
        # Without an account, Slurm uses the default one of the user.
        matching = [entry for entry in associations if account in ("", entry[0])]
        if not matching:
            allowed = ", ".join(sorted({entry[0] for entry in associations})) or "none"
            raise ProvisionPermissionError(
                f"The user may not use the Slurm account {account or '(default)'}; allowed: "
                f"{allowed}.",
                do="Set SlurmOptions(account=…) to an allowed account, or ask the cluster's "
                "administrators for access.",
            )
        if qos and not any(qos in entry[2] for entry in matching):
            allowed = ", ".join(sorted({name for entry in matching for name in entry[2]}))
            raise ProvisionPermissionError(
                f"The user may not use the QOS {qos}; allowed: {allowed}.",
                do="Set SlurmOptions(qos=…) to an allowed QOS, or ask the cluster's administrators "
                "for access.",
            )
        return ", ".join(sorted({entry[0] for entry in matching}))

    def _on_demand_offers(self) -> list[Offer]:
        """Return the offers of `on_demand_partitions` and `on_demand_qos`."""
        if not self._options.on_demand_partitions and not self._options.on_demand_qos:
            return []
        listed = offers.list_offers(self._options).offers
        return [offer for offer in listed if offer.market is Market.ON_DEMAND]

    def _check_on_demand(self, offer: Offer) -> str:
        """Raise `ConfigError` if Slurm rejects jobs of the offer or may preempt them.

        Preemption by QOS is not checked: any QOS may list it in its `Preempt`.
        """
        detail = self._check_submission(offer)
        partition = offer.options.get(offers.PARTITION, "")
        mode = self._find_partition(partition).get("PreemptMode", "")
        by_partition = self._cluster_config.get("PreemptType", "").endswith("partition_prio")
        # https://slurm.schedmd.com/preempt.html
        if by_partition and mode != "OFF":
            raise ConfigError(
                f"PreemptMode of the partition {partition or '(default)'} is {mode}: jobs of "
                "partitions with a higher PriorityTier preempt those of on-demand machines.",
                do="Set SlurmOptions(on_demand_partitions=…) to partitions with PreemptMode=OFF.",
            )
        return detail

    def _check_submission(self, offer: Offer | None = None) -> str:
        request = GroupRequest(
            token=Token("t-checkup"),
            num_workers=1,
            total_workers=1,
            run_name="checkup",
            offer=offer,
        )
        plan = render.plan(request, self._options)
        return self._slurm.test_submission(plan.body["arguments"], plan.body["script"])

    def _check_kill_wait(self) -> str:
        # For example '30 sec'. Slurm sends SIGKILL this long after SIGTERM.
        wait_s = float(self._cluster_config["KillWait"].split()[0])
        if wait_s < self._options.grace_s:
            raise ConfigError(
                f"SlurmOptions(grace_s={self._options.grace_s:g}) is longer than the cluster's "
                f"KillWait: Slurm kills tasks {wait_s:.0f} s after SIGTERM.",
                do=f"Set SlurmOptions(grace_s={wait_s:.0f}).",
            )
        # With this parameter Slurm sends the signal of --signal also before a preemption.
        early = "preempt_send_user_signal" in self._cluster_config.get("SlurmctldParameters", "")
        return f"KillWait {wait_s:.0f} s" + ("; preemption is announced" if early else "")

    def _check_work_dir(self) -> str:
        # Only this machine can be checked; the nodes are expected to mount the same directory.
        folder = Path(self._options.work_dir or Path.cwd())
        if not folder.is_dir():
            raise CheckSkippedError(
                f"SlurmOptions(work_dir={str(folder)!r}) does not exist on this machine; only the "
                "nodes can check it"
            )
        if not os.access(folder, os.W_OK):
            raise ConfigError(
                f"The working directory of the tasks, {folder}, is not writable.",
                do="Set SlurmOptions(work_dir=…) to a writable directory that all nodes mount.",
            )
        return f"{folder}, if the nodes mount it as well"


def _split_names(partition: Mapping[str, str], name: str) -> set[str]:
    return set(partition.get(name, "").split(","))


def _is_unrestricted(partition: Mapping[str, str], name: str) -> bool:
    return partition.get(name, "") in _UNRESTRICTED


def _is_allowed(partition: Mapping[str, str], kind: str, *, name: str) -> bool:
    """Check `name` against the partition's allow and deny lists. True if `name` is ''."""
    if not name:
        return True
    allowed = _is_unrestricted(partition, f"Allow{kind}") or name in _split_names(
        partition, f"Allow{kind}"
    )
    return allowed and name not in _split_names(partition, f"Deny{kind}")
