"""Console output of a run's machines, as stored by their backend.

It includes the boot and installation output, which explains why an agent never joined. The journal
lists the machines; the backend returns their output (decision 0035).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from spotfit.client.keyring import key_of
from spotfit.core.errors import ConfigError, SpotfitError
from spotfit.core.input_checks import did_you_mean
from spotfit.host import log
from spotfit.ledger.journal import Journal, Ledger
from spotfit.model.events import FitStarted, GroupPlanned, GroupSubmitted, JournalEntry, NodeLost
from spotfit.model.group import GroupHandle
from spotfit.model.spec import RunSpec
from spotfit.provision.api import fetch_machine_output
from spotfit.provision.profile import open_provisioner
from spotfit.store.api import Store

ALL_MACHINES = "all"
# The lines about a failed start are usually the last ones; the whole output may be megabytes.
_MAX_UNJOINED_LINES = 20


class GrantedMachine(NamedTuple):
    """A machine that was granted to the run, and the spec of the fit that requested it."""

    handle: GroupHandle
    node: int
    spec: RunSpec


@dataclass
class GrantedMachines:
    """All machines that were granted to a run, collected from its journal.

    The name of a machine is '<group token>/<node index>', as in the journal's events.
    """

    spec: RunSpec | None = None
    """Spec of the latest fit."""
    by_name: dict[str, GrantedMachine] = field(default_factory=dict)
    """Oldest first."""
    lost_before_join: list[str] = field(default_factory=list)
    """Names of machines of the latest fit that were lost before their agent joined."""
    _nodes_by_token: dict[str, int] = field(default_factory=dict)

    def on_entry(self, _slot: int, _body: bytes, entry: JournalEntry) -> None:
        """Update the collection with the next entry of the journal.

        Entries must be passed in order, from the first.
        """
        match entry.event:
            case FitStarted(spec=spec):  # losses of an earlier fit do not explain this one's error
                self.spec, self.lost_before_join = spec, []
            # The handle does not contain the number of machines; the plan is journaled before it.
            case GroupPlanned(plan=plan):
                self._nodes_by_token[plan.token] = plan.num_nodes
            case GroupSubmitted(token=token, handle=handle):
                assert self.spec is not None
                for node in range(self._nodes_by_token[token]):
                    self.by_name[f"{token}/{node}"] = GrantedMachine(handle, node, self.spec)
            case NodeLost(token=token, node=node, agent=None) as lost if (
                not lost.is_withdrawn_request
            ):
                self.lost_before_join.append(f"{token}/{node}")
            case _:
                pass

    def select(self, selector: str) -> list[str]:
        """Return machine names for `selector`: a name, a number, or 'all'.

        A name is '<group token>/<node index>' ('t-…/0'), a number the index in the order in which
        machines were granted, from 0. Raises `ConfigError` if there is no such machine.
        """
        names = list(self.by_name)
        # A number cannot be mistaken for a name: names contain a slash.
        if selector.isdecimal() and int(selector) < len(names):
            selector = names[int(selector)]
        if selector == ALL_MACHINES:
            return names
        if selector not in self.by_name:
            raise ConfigError(
                f"The run has no machine {selector!r}. {did_you_mean(selector, names)}".rstrip(),
                do=f"Choose one of its {len(names)} machines ({', '.join(names) or 'none'}), its "
                f"number, or {ALL_MACHINES!r}.",
            )
        return [selector]

    def read_output(self, name: str, *, max_lines: int) -> list[str]:
        """Return the last lines of each start of the machine `name`, prefixed with the name.

        Queries the backend, which may take seconds. `max_lines` limits each start. If there is no
        output, the only line says why. Raises `ConfigError` if the backend cannot be opened here,
        and the exceptions of its client library.
        """
        # With the spec of the fit that rented it: a later fit may use another backend.
        handle, node, spec = self.by_name[name]
        provisioner = open_provisioner(spec.provisioner, spec.provisioner_options)
        if not provisioner.traits.keeps_output:
            return [f"({name}: {provisioner.name} does not store the output of its machines)"]
        lines: list[str] = []
        for output in fetch_machine_output(provisioner, handle, node, max_lines=max_lines):
            lines.append(f"({name}: {output.source})")
            lines.extend(f"({name}) {line}" for line in output.lines)
        return lines or [f"({name}: no output, or not yet available)"]


def read_granted_machines(store: Store) -> GrantedMachines:
    """Return all machines that were granted to a run, from all entries of its journal.

    `store` is rooted at the run's directory. Raises `StoreError` or `JournalError`.
    """
    machines = GrantedMachines()
    # The entries are needed: a view does not name the machines that were lost before their agent
    # joined, nor the specs of earlier fits.
    journal = Journal(store, ignore_view_cache=True)
    journal.on_entry = machines.on_entry
    journal.catch_up()
    return machines


def read_machine_output(store: Store, selector: str, *, max_lines: int) -> Iterator[str]:
    """Yield the last lines of the selected machines, each prefixed with the machine's name.

    For `RunHandle.machine_logs`; `selector` as in `GrantedMachines.select`, `max_lines` per start
    of a machine. If the backend fails for a machine, its error is a line. Raises `ConfigError` for
    an unknown machine, and without the run's key, at the first iteration.
    """
    if key_of(store) is None:
        raise ConfigError(
            f"The output of the machines of {store.url} cannot be read: this computer has no key "
            "of the run, with which it could verify the backend that the journal names.",
            do="Run the command on the computer where fit() was called, or set SPOTFIT_RUN_ID and "
            "SPOTFIT_RUN_SECRET to the name and the content of the run's file in ~/.spotfit/keys "
            "there. `spotfit logs` without --machine needs no key.",
        )
    machines = read_granted_machines(store)
    for name in machines.select(selector):
        try:
            yield from machines.read_output(name, max_lines=max_lines)
        except Exception as error:  # noqa: BLE001  # each client library has its own errors
            yield f"({name}: its output cannot be read: {error})"


def read_unjoined_output(ledger: Ledger, *, max_machines: int = 3) -> str:
    """Return the output of the latest machines that were lost before their agent joined.

    Of at most `max_machines` machines of the latest fit, 20 lines each; '' if there is none.
    Failures are only logged, because the text is a supplement to an error that must reach the user.
    """
    lines: list[str] = []
    if key_of(ledger.store) is None:  # the backend that the journal names cannot be verified
        return ""
    try:
        machines = read_granted_machines(ledger.store)
        # An agent may have joined and died before the leader recorded it in the journal; its output
        # is in the store already.
        joined = {f"{member.token}/{member.node}" for member in ledger.list_members()}
        lost = [name for name in dict.fromkeys(machines.lost_before_join) if name not in joined]
        for name in [name for name in lost if name in machines.by_name][-max_machines:]:
            # Per machine: the other machines may belong to a backend that can be reached.
            try:
                lines += machines.read_output(name, max_lines=_MAX_UNJOINED_LINES)
            except Exception as error:  # noqa: BLE001  # each client library has its own errors
                log.warning("machine.no_output", machine=name, reason=str(error))
    except SpotfitError as error:  # of the store, while reading the journal or the members
        log.warning("machine.no_output", reason=error.message)
    title = "Output of machines that were lost before their agent joined:"
    return "\n".join([title, *lines]) if lines else ""
