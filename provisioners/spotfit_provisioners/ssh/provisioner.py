"""The four verbs on hosts that one reaches by ssh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

from spotfit.core.errors import ConfigError, MachineError, SpotfitError
from spotfit.host import log, machine
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    NodeStatus,
)
from spotfit.provision.api import Refusal, Traits
from spotfit.provision.checkup import Finding, UnseenError, look
from spotfit.provision.launch import Launch
from spotfit.provision.output import Said
from spotfit_provisioners.ssh import client, render, states
from spotfit_provisioners.ssh.client import Hosts
from spotfit_provisioners.ssh.options import SshOptions
from spotfit_provisioners.ssh.states import Survey

_AT_ONCE = 16

Given = TypeVar("Given")


class SshProvisioner:
    """A group is an agent on each of some hosts; every host notes which group it works for."""

    name = render.BACKEND
    Options: ClassVar = SshOptions

    def __init__(self, options: SshOptions) -> None:
        self.options = options
        self._hosts = Hosts(options)

    @classmethod
    def with_options(cls, **options: Any) -> SshProvisioner:
        """From the fields of `SshOptions`."""
        return cls(SshOptions(**options))

    @property
    def traits(self) -> Traits:
        return Traits(
            spot=False,
            max_nodes=max(1, len(self.options.hosts)),
            notice_s=self.options.grace_s,
            observe_s=5.0,
            told_late_s=5.0,
            notices=("machine", "signal"),
            keeps_output=True,
        )

    def plan(self, request: GroupRequest) -> GroupPlan:
        return render.plan(request, self.options)

    def submit(self, plan: GroupPlan, launch: Launch) -> GroupHandle | Refusal:
        """Each machine on the first host, in order, that is free; hosts decide under a lock.

        Of two who ask at the same time both find the other's machines: of one that was started on
        two hosts the first host's stays. Where there are too few hosts none is kept.
        """
        surveys = self._surveys(plan)
        taken = _first_of_each(surveys, plan.nodes)
        missing = [number for number in range(plan.nodes) if number not in taken]
        free = _in_order(surveys)
        if not missing:
            return self._settled(plan, surveys, begun=[])
        begun = []
        if len(free) >= len(missing):
            begun = [self._begin(number, free, plan, launch) for number in missing]
            surveys = self._surveys(plan)
        return self._settled(plan, surveys, begun)

    def observe(self, handle: GroupHandle) -> GroupStatus:
        """A host that does not answer may answer again: its machine waits until then."""
        place = self._places(handle)

        def state(number: int, host: str) -> NodeStatus:
            try:
                return states.node(self._hosts.run(host, render.look(place(number, host))))
            except SpotfitError as silent:
                return NodeStatus(NodeState.WAITING, silent.what)

        return GroupStatus(tuple(_at_once(state, handle.detail["hosts"])))

    def cancel(self, handle: GroupHandle) -> None:
        """SIGTERM to each agent, SIGKILL to what is left of it `grace_s` later.

        A host that does not answer is left alone: its agent, if it lives, learns from the journal
        that nobody wants it. Nothing is paid meanwhile.
        """
        place, grace_s = self._places(handle), self.options.grace_s

        def stop(number: int, host: str) -> None:
            try:
                self._hosts.run(host, render.stop(place(number, host), grace_s))
            except SpotfitError as silent:
                log.warning("ssh.not_told_to_end", host=host, why=silent.what)

        _at_once(stop, handle.detail["hosts"])

    def said(self, handle: GroupHandle, node: int, *, last: int) -> list[Said]:
        """From the host, which keeps it for a week."""
        host = handle.detail["hosts"][node]
        place = self._places(handle)(node, host)
        told = self._hosts.run(host, render.tail(place, last))
        return [Said(f"{host}:{place}/log", tuple(told.splitlines()))] if told else []

    def examine(self, storage: str = "") -> Iterator[Finding]:
        """The ssh command, then all hosts at once: whether each lets us in, has what an agent
        needs, and reaches the next one."""
        here = look("there is an ssh client", client.found)
        yield here
        if here.well:
            hosts = self.options.hosts
            yield from _at_once(
                lambda _, host: look(f"{host} is ready", lambda: self._sound(host)), hosts
            )
            if len(hosts) > 1:
                yield from _at_once(self._reach, hosts)

    def _reach(self, number: int, host: str) -> Finding:
        """Agents ask for replacements there; a run trains without that, too."""
        other = self.options.hosts[(number + 1) % len(self.options.hosts)]

        def tell() -> None:
            said = self._hosts.run(host, render.reach(self._hosts.words(), other))
            last = said.rpartition("\n")[2]
            if last != "reached":
                raise UnseenError(f"it does not: {last}")

        do = (
            f"Let `ssh -o BatchMode=yes {other} true` work on {host}: else a lost host is replaced "
            "only while whoever called fit() is awake."
        )
        return look(f"{host} reaches {other}", tell, do=do)

    def _sound(self, host: str) -> str:
        """What an agent would find there. Raises `ConfigError` where it could not read what we
        send."""
        told = self._hosts.run(host, render.check(self.options)).replace("\n", "; ")
        version = told.removeprefix("Python ").partition(",")[0]
        ours = machine.python_version()
        if version.split(".")[:2] != ours.split(".")[:2]:
            raise ConfigError(
                f"It has Python {version}, and here is {ours}: what one pickles the other cannot "
                "read.",
                do="Name another interpreter in SshOptions(python=…), or use that one here.",
            )
        return told

    # --- hosts -------------------------------------------------------------------------------

    def _surveys(self, plan: GroupPlan) -> dict[str, Survey | SpotfitError]:
        """Of every host; raises if none answers."""

        def ask(_: int, host: str) -> Survey | SpotfitError:
            script = render.survey(self._place(host, plan.token, 0), self.options.free_if)
            try:
                return states.survey(self._hosts.run(host, script))
            except SpotfitError as wrong:
                return wrong

        hosts = plan.body["hosts"]
        surveys = dict(zip(hosts, _at_once(ask, hosts), strict=True))
        wrong = [one for one in surveys.values() if isinstance(one, SpotfitError)]
        if len(wrong) == len(hosts):
            raise next((one for one in wrong if isinstance(one, MachineError)), wrong[0])
        return surveys

    def _begin(self, number: int, free: list[str], plan: GroupPlan, launch: Launch) -> str:
        """Start that machine on the first of the hosts that is still free; '' if none is.

        A host that falls silent meanwhile may have heard us: that is raised, and asked again.
        """
        while free:
            host = free.pop(0)
            environment = {
                **plan.body["environment"],
                **launch.environment(plan.token, number, plan.slots),
            }
            place = self._place(host, plan.token, number)
            script = render.start(place, plan.body["agent"], environment)
            if self._hosts.run(host, script) != states.BUSY:
                return host
        return ""

    def _settled(
        self, plan: GroupPlan, surveys: dict[str, Survey | SpotfitError], begun: list[str]
    ) -> GroupHandle | Refusal:
        """What has come about: one host for each machine, or nothing at all.

        Raises what is wrong with a host on which a machine was begun a moment ago.
        """
        taken = _first_of_each(surveys, plan.nodes)
        whole = len(taken) == plan.nodes
        for host in begun if not whole else ():
            if isinstance(silent := surveys.get(host), SpotfitError):
                raise silent
        for host, number in _known(surveys):
            if not whole or taken.get(number) != host:
                self._hosts.run(host, render.undo(self._place(host, plan.token, number)))
        if not whole:
            return Refusal(_too_few(plan.nodes, surveys))
        detail = {
            "hosts": [taken[number] for number in range(plan.nodes)],
            "folder": self.options.folder,
        }
        return GroupHandle(plan.token, self.name, plan.token, detail)

    def _place(self, host: str, token: str, number: int) -> str:
        return render.place_of(self.options.folder, host, token, number)

    def _places(self, handle: GroupHandle) -> Callable[[int, str], str]:
        folder = handle.detail["folder"]
        return lambda number, host: render.place_of(folder, host, handle.name, number)


def _known(surveys: Mapping[str, Survey | SpotfitError]) -> list[tuple[str, int]]:
    """Hosts and the machines of the group that they know, in the order of the hosts."""
    return [
        (host, number)
        for host, survey in surveys.items()
        if isinstance(survey, Survey)
        for number in survey.numbers
    ]


def _first_of_each(surveys: Mapping[str, Survey | SpotfitError], nodes: int) -> dict[int, str]:
    """Which host has which machine of the group: the first, if two were faster."""
    taken: dict[int, str] = {}
    for host, number in _known(surveys):
        if number < nodes:
            taken.setdefault(number, host)
    return taken


def _in_order(surveys: Mapping[str, Survey | SpotfitError]) -> list[str]:
    """The free hosts as they were named, but those last whose last agent failed."""
    free = {
        host: survey
        for host, survey in surveys.items()
        if isinstance(survey, Survey) and survey.state == states.FREE
    }
    return sorted(free, key=lambda host: not free[host].well)


def _too_few(nodes: int, surveys: Mapping[str, Survey | SpotfitError]) -> str:
    why = {
        host: states.WHY_NOT[survey.state] if isinstance(survey, Survey) else survey.what
        for host, survey in surveys.items()
    }
    told = "; ".join(f"{host}: {reason}" for host, reason in why.items() if reason)
    return f"{nodes} free hosts are asked for. {told}"


def _at_once(ask: Callable[[int, str], Given], hosts: Sequence[str]) -> list[Given]:
    """What each of them gives, in order."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(ask, range(len(hosts)), hosts))
