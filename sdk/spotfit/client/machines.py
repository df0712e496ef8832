"""What machines of a run printed, as their backend kept it; the journal tells which there were."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from spotfit.core.errors import ConfigError, SpotfitError
from spotfit.core.nearest import did_you_mean
from spotfit.host import log
from spotfit.ledger.journal import Journal
from spotfit.ledger.run import Ledger
from spotfit.model.events import Entry, FitStarted, Intended, NodeLost, Submitted
from spotfit.model.group import GroupHandle
from spotfit.model.spec import RunSpec
from spotfit.provision.output import said
from spotfit.provision.registry import open_provisioner
from spotfit.store.api import Store

ALL = "all"


class Machine(NamedTuple):
    """One that a run was granted, and what the fit that asked for it was told to use."""

    handle: GroupHandle
    node: int
    spec: RunSpec


@dataclass
class Machines:
    """Every machine that a run was granted, by the name that its story gives it."""

    spec: RunSpec | None = None
    """Of the latest fit."""
    known: dict[str, Machine] = field(default_factory=dict)
    """The oldest first."""
    lost: list[str] = field(default_factory=list)
    """Those that went in the latest fit without an agent."""
    _nodes: dict[str, int] = field(default_factory=dict)

    def hear(self, _slot: int, _body: bytes, entry: Entry) -> None:
        match entry.event:
            case FitStarted(spec=spec):
                self.spec, self.lost = spec, []
            case Intended(plan=plan):
                self._nodes[plan.token] = plan.nodes
            case Submitted(token=token, handle=handle):
                assert self.spec is not None
                for node in range(self._nodes[token]):
                    self.known[f"{token}/{node}"] = Machine(handle, node, self.spec)
            case NodeLost(token=token, node=node, agent=None):
                self.lost.append(f"{token}/{node}")
            case _:
                pass

    def chosen(self, which: str) -> list[str]:
        """That one by its name or number, or all. Raises `ConfigError` where there is none such."""
        names = list(self.known)
        if which.isdecimal() and int(which) < len(names):
            which = names[int(which)]
        if which == ALL:
            return names
        if which not in self.known:
            raise ConfigError(
                f"The run has no machine {which!r}. {did_you_mean(which, names)}".rstrip(),
                do=f"It had {len(names)}: {', '.join(names) or 'none'}; or say {ALL!r}.",
            )
        return [which]

    def said_by(self, name: str, *, last: int) -> list[str]:
        """The last lines it printed, life by life, each with its name before it. Raises whatever
        its backend raises."""
        handle, node, spec = self.known[name]
        provisioner = open_provisioner(spec.provisioner, spec.provisioner_options)
        if not provisioner.traits.keeps_output:
            return [f"({name}: {provisioner.name} keeps nothing of what its machines print)"]
        lines: list[str] = []
        for life in said(provisioner, handle, node, last=last):
            lines.append(f"({name}: {life.where})")
            lines.extend(f"({name}) {line}" for line in life.lines)
        return lines or [f"({name}: nothing is told of it, or not yet)"]


def machines_of(store: Store) -> Machines:
    """All that the journal there tells of."""
    machines = Machines()
    journal = Journal(store, whole=True)
    journal.heard = machines.hear
    journal.catch_up()
    return machines


def printed(store: Store, which: str, *, last: int) -> Iterator[str]:
    """The last lines that machine printed, or those of all of them; why where one cannot be asked.
    Raises `ConfigError` for a machine that is none."""
    machines = machines_of(store)
    for name in machines.chosen(which):
        try:
            yield from machines.said_by(name, last=last)
        except Exception as trouble:  # noqa: BLE001  # each client library has its own errors
            yield f"({name}: cannot be told: {trouble})"


def last_words(ledger: Ledger, *, last: int = 20, most: int = 3) -> str:
    """What the latest machines printed that ended before their agents spoke; '' if there are none,
    or if nobody can tell. An error's own words matter more: what goes wrong here is only logged."""
    lines: list[str] = []
    try:
        machines = machines_of(ledger.store)
        spoke = {f"{member.token}/{member.node}" for member in ledger.offers()}
        silent = [one for one in dict.fromkeys(machines.lost) if one not in spoke]
        for name in [name for name in silent if name in machines.known][-most:]:
            lines += _or_none(machines, name, last)
    except SpotfitError as trouble:
        log.warning("machine.unheard", why=trouble.what)
    return "\n".join(["What they printed before they ended:", *lines]) if lines else ""


def _or_none(machines: Machines, name: str, last: int) -> list[str]:
    try:
        return machines.said_by(name, last=last)
    except Exception as trouble:  # noqa: BLE001  # each client library has its own errors
        log.warning("machine.unheard", machine=name, why=str(trouble))
        return []
