"""What a cluster must let us do, looked at one by one, and how to mend what is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from spotfit.core.errors import ConfigError, ProvisionPermissionError
from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.provision.checkup import Finding, UnseenError, look
from spotfit_provisioners.slurm import render
from spotfit_provisioners.slurm.client import Slurm
from spotfit_provisioners.slurm.options import SlurmOptions

_EVERYBODY = ("", "ALL", "(null)")


def examine(options: SlurmOptions, slurm: Slurm) -> Iterator[Finding]:
    """Everything; nothing but the controller, where that does not answer."""
    answers = look(
        "the controller answers",
        lambda: slurm.settings()["ClusterName"],
        do="`scontrol ping` says which controllers there are.",
    )
    yield answers
    if answers.well:
        yield from _Examiner(options, slurm).rest()


class _Examiner:
    """What there is to look at once the controller answers."""

    def __init__(self, options: SlurmOptions, slurm: Slurm) -> None:
        self._options = options
        self._slurm = slurm
        self._settings = slurm.settings()

    def rest(self) -> Iterator[Finding]:
        for name in self._options.partitions or ("",):
            called = f"the partition {name}" if name else "the default partition"
            yield look(f"{called} lets us in", lambda n=name: self._partition(n))  # type: ignore[misc]
            yield look(
                f"a task preempted in {called} comes back",
                lambda n=name: self._comes_back(n),  # type: ignore[misc]
            )
        yield look("the account may be charged", self._charged)
        yield look("a task would be taken", self._try)
        yield look("tasks are left the time that they count on", self._patience)
        yield look("tasks can write where they run", self._folder)

    # --- partitions --------------------------------------------------------------------------

    def _partition(self, name: str) -> str:
        """Its nodes. Raises `ConfigError` for all that keeps us out of it."""
        told = self._found(name)
        if wrong := [what for what, well in self._doors(told) if not well]:
            raise ConfigError(
                f"It {', '.join(wrong)}.",
                do="`sinfo` and `scontrol show partition` tell of all there are: "
                "SlurmOptions(partitions=…, account=…, qos=…).",
            )
        return f"{told.get('TotalNodes', '?')} nodes, up to {told.get('MaxTime', '?')}"

    def _found(self, name: str) -> Mapping[str, str]:
        told = self._slurm.partition(name)
        if not told:
            raise ConfigError(
                f"There is no partition {name!r}." if name else "There is no default partition.",
                do="`sinfo` names all there are: SlurmOptions(partitions=…).",
            )
        return told

    def _doors(self, told: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
        """What is wrong with it, and whether it is not."""
        account, qos = self._options.account, self._options.qos
        yield f"is {told.get('State')}", told.get("State") == "UP"
        yield "is for root only", told.get("RootOnly") != "YES" or os.getuid() == 0
        yield (
            f"lets only the groups {told.get('AllowGroups')} in",
            _is_open(told, "AllowGroups")
            or bool(set(self._slurm.groups()) & _names(told, "AllowGroups")),
        )
        yield f"does not let the account {account} in", _lets_in(told, "Accounts", account)
        yield f"does not let the QOS {qos} in", _lets_in(told, "Qos", qos)

    def _comes_back(self, name: str) -> str:
        """Raises `ConfigError` where a preempted task is stopped and kept: whoever is stopped says
        nothing, hears nothing and holds up all the others."""
        mode = self._found(name).get("PreemptMode", "")
        if mode == "OFF" and self._settings.get("PreemptType", "").endswith("qos"):
            mode = self._settings.get("PreemptMode", "")
        if "SUSPEND" in mode or "GANG" in mode:
            raise ConfigError(
                f"PreemptMode is {mode}: its preempted tasks are suspended.",
                do="Ask for PreemptMode=REQUEUE there, or choose another partition.",
            )
        back = {"REQUEUE": "Slurm brings it back", "OFF": "nobody preempts it there"}
        return f"PreemptMode {mode}: {back.get(mode, 'the run asks for another')}"

    # --- who is charged, what is taken -------------------------------------------------------

    def _charged(self) -> str:
        """Raises `ProvisionPermissionError` for an account or QOS that is not ours."""
        if not self._settings.get("AccountingStorageType", "").endswith("slurmdbd"):
            return "the cluster keeps no accounts"
        if "associations" not in self._settings.get("AccountingStorageEnforce", "").lower():
            return "the cluster lets everybody in, whatever account is named"
        ours = self._slurm.associations()
        account, qos = self._options.account, self._options.qos
        mine = [one for one in ours if account in ("", one[0])]
        if not mine:
            known = ", ".join(sorted({one[0] for one in ours})) or "none"
            raise ProvisionPermissionError(
                f"We may not be charged to {account or 'any account'}, only to: {known}.",
                do="Set SlurmOptions(account=…), or ask the cluster's administrators for it.",
            )
        if qos and not any(qos in one[2] for one in mine):
            known = ", ".join(sorted({name for one in mine for name in one[2]}))
            raise ProvisionPermissionError(
                f"The QOS {qos} is not ours, only: {known}.",
                do="Set SlurmOptions(qos=…), or ask the cluster's administrators for it.",
            )
        return ", ".join(sorted({one[0] for one in mine}))

    def _try(self) -> str:
        request = GroupRequest(Token("t-checkup"), 1, 1, run_name="checkup")
        plan = render.plan(request, self._options)
        return self._slurm.would_take(plan.body["arguments"], plan.body["script"])

    def _patience(self) -> str:
        wait_s = float(self._settings["KillWait"].split()[0])
        if wait_s < self._options.grace_s:
            raise ConfigError(
                f"Slurm kills {wait_s:.0f} s after SIGTERM, and grace_s is "
                f"{self._options.grace_s:.0f}.",
                do=f"Set SlurmOptions(grace_s={wait_s:.0f}).",
            )
        early = "preempt_send_user_signal" in self._settings.get("SlurmctldParameters", "")
        return f"KillWait {wait_s:.0f} s" + ("; preemption is announced" if early else "")

    def _folder(self) -> str:
        """Looked at here: nodes must see the same folder."""
        folder = Path(self._options.folder or Path.cwd())
        if not folder.is_dir():
            raise UnseenError(f"{folder} is not on this machine")
        if not os.access(folder, os.W_OK):
            raise ConfigError(
                f"We may not write to {folder}.", do="Name another one in SlurmOptions(folder=…)."
            )
        return f"{folder}, if the nodes have it, too"


def _names(told: Mapping[str, str], name: str) -> set[str]:
    return set(told.get(name, "").split(","))


def _is_open(told: Mapping[str, str], name: str) -> bool:
    return told.get(name, "") in _EVERYBODY


def _lets_in(told: Mapping[str, str], kind: str, name: str) -> bool:
    """By a list of those allowed or one of those denied; who names nothing is not looked at."""
    if not name:
        return True
    allowed = _is_open(told, f"Allow{kind}") or name in _names(told, f"Allow{kind}")
    return allowed and name not in _names(told, f"Deny{kind}")
