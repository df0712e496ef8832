"""What machines of a run printed, as their backend kept it; the journal tells which there were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from spotfit.core.errors import ConfigError
from spotfit.core.nearest import did_you_mean
from spotfit.host import log
from spotfit.ledger.journal import Journal
from spotfit.ledger.run import Ledger
from spotfit.model.events import Entry, FitStarted, Intended, NodeLost, Submitted
from spotfit.model.group import GroupHandle
from spotfit.model.spec import RunSpec
from spotfit.provision.api import Provisioner
from spotfit.provision.output import said
from spotfit.provision.registry import open_provisioner
from spotfit.store.api import Store

ALL = "all"


@dataclass
class Machines:
    """Every machine that a run was granted, by the name that its story gives it."""

    spec: RunSpec | None = None
    handles: dict[str, tuple[GroupHandle, int]] = field(default_factory=dict)
    """The oldest first."""
    lost: list[str] = field(default_factory=list)
    """Those that went without an agent."""
    _nodes: dict[str, int] = field(default_factory=dict)

    def hear(self, _slot: int, _body: bytes, entry: Entry) -> None:
        match entry.event:
            case FitStarted(spec=spec):
                self.spec = spec
            case Intended(plan=plan):
                self._nodes[plan.token] = plan.nodes
            case Submitted(token=token, handle=handle):
                names = {f"{token}/{node}": (handle, node) for node in range(self._nodes[token])}
                self.handles.update(names)
            case NodeLost(token=token, node=node, agent=None):
                self.lost.append(f"{token}/{node}")
            case _:
                pass

    def chosen(self, which: str) -> Mapping[str, tuple[GroupHandle, int]]:
        """That one by its name or number, or all. Raises `ConfigError` where there is none such."""
        names = list(self.handles)
        if which.isdecimal() and int(which) < len(names):
            which = names[int(which)]
        if which == ALL:
            return self.handles
        if which not in self.handles:
            raise ConfigError(
                f"The run has no machine {which!r}. {did_you_mean(which, names)}".rstrip(),
                do=f"It had {len(names)}: {', '.join(names) or 'none'}; or say {ALL!r}.",
            )
        return {which: self.handles[which]}


def machines_of(store: Store) -> Machines:
    """All that the journal there tells of."""
    machines = Machines()
    journal = Journal(store, whole=True)
    journal.heard = machines.hear
    journal.catch_up()
    return machines


def printed(store: Store, which: str, *, last: int) -> Iterator[str]:
    """The last lines that machine printed, life by life, each with its name before it; or those of
    all of them. Raises `ConfigError` for a machine that is none."""
    machines = machines_of(store)
    chosen = machines.chosen(which)
    provisioner = _provisioner(machines)
    if not provisioner.traits.keeps_output:
        yield f"({provisioner.name} keeps nothing of what its machines print)"
        return
    for name, (handle, node) in chosen.items():
        yield from _lines(provisioner, name, handle, node, last=last)


def last_words(ledger: Ledger, *, last: int = 20, most: int = 3) -> str:
    """What the latest machines printed that ended before their agents spoke; '' if there are none,
    or if nobody can tell. An error's own words matter more: what goes wrong here is only logged."""
    machines = machines_of(ledger.store)
    spoke = {f"{member.token}/{member.node}" for member in ledger.offers()}
    silent = [one for one in dict.fromkeys(machines.lost) if one not in spoke]
    names = [name for name in silent if name in machines.handles][-most:]
    if not names:
        return ""
    try:
        provisioner = _provisioner(machines)
        lines = [
            line
            for name in names
            for line in _lines(provisioner, name, *machines.handles[name], last=last)
        ]
    except Exception as trouble:  # noqa: BLE001  # each client library has its own errors
        log.warning("machine.unheard", why=str(trouble))
        return ""
    return "\n".join(["What they printed before they ended:", *lines]) if lines else ""


def _lines(
    provisioner: Provisioner, name: str, handle: GroupHandle, node: int, *, last: int
) -> Iterator[str]:
    lives = said(provisioner, handle, node, last=last)
    for life in lives:
        yield f"({name}: {life.where})"
        yield from (f"({name}) {line}" for line in life.lines)
    if not lives:
        yield f"({name}: nothing is told of it, or not yet)"


def _provisioner(machines: Machines) -> Provisioner:
    assert machines.spec is not None
    return open_provisioner(machines.spec.provisioner, machines.spec.provisioner_options)
