"""`SshProvisioner`: start, observe and stop agents on a fixed list of hosts.

State of a host:

    state     | meaning                               | submit uses it
    ----------|---------------------------------------|---------------
    free      | no agent, not closed                  | yes
    busy      | an agent runs                         | no
    closed    | <state_dir>/<host>.closed exists      | no
    occupied  | `availability_command` fails          | no
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

from spotfit.core.errors import ConfigError, InfrastructureError, SpotfitError
from spotfit.host import log, machine, system
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    NodeStatus,
)
from spotfit.provision.api import (
    AccountCheck,
    CheckSkippedError,
    MachineOutput,
    Refusal,
    Traits,
    run_check,
)
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.offers import OfferListing
from spotfit_provisioners.ssh import client, offers, render, states
from spotfit_provisioners.ssh.client import SshClient
from spotfit_provisioners.ssh.options import SshOptions
from spotfit_provisioners.ssh.states import SshHostStatus

# Each connection is an ssh process, whose key exchange needs CPU time.
_MAX_CONCURRENCY = 16

ResultT = TypeVar("ResultT")


class SshProvisioner:
    """A group is one agent on each of its hosts. Every host records which group it belongs to."""

    name = render.BACKEND
    Options: ClassVar = SshOptions

    def __init__(self, options: SshOptions) -> None:
        self.options = options
        self._client = SshClient(options)

    @classmethod
    def with_options(cls, **options: Any) -> SshProvisioner:
        """Construct from the fields of `SshOptions`."""
        return cls(SshOptions(**options))

    @property
    def traits(self) -> Traits:
        return Traits(
            spot=False,
            max_nodes=max(1, len(self.options.hosts)),
            notice_s=self.options.grace_s,
            observe_interval_s=5.0,
            status_lag_s=5.0,
            read_lag_s=0.0,
            notice_sources=("machine", "signal"),
            keeps_output=True,
        )

    def plan(self, request: GroupRequest) -> GroupPlan:
        return render.plan(request, self.options)

    def offers(self, request: GroupRequest) -> OfferListing:
        """Return one offer, with the price of the option `prices`."""
        return offers.list_offers(self.options, now_s=system.wall_ms() / 1000)

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        """Start each machine on the first free host; a lock on the host prevents two agents.

        Concurrent submissions find each other's machines: if a machine was started on two hosts,
        the one on the first host is kept. If there are too few hosts, no machine is kept.
        """
        surveys = self._query_hosts(plan)
        taken = _first_host_by_node(surveys, plan.num_nodes)
        missing = [number for number in range(plan.num_nodes) if number not in taken]
        if not missing:
            return self._finish_submission(plan, surveys, started_hosts=[])
        free = {
            host: survey
            for host, survey in surveys.items()
            if isinstance(survey, SshHostStatus) and survey.state == states.FREE
        }
        # In the listed order, but hosts whose last agent failed at the end.
        hosts = sorted(free, key=lambda host: not free[host].is_healthy)
        started = []
        # With too few hosts nothing is started: a part of a group would be removed again.
        if len(free) >= len(missing):
            started = [
                self._start_machine(number, hosts, plan=plan, launch=launch) for number in missing
            ]
            # Again, to find the machines that a concurrent submission has started meanwhile.
            surveys = self._query_hosts(plan)
        return self._finish_submission(plan, surveys, started_hosts=started)

    def find_group(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | None:
        """Return the group if all its machines were started; remove those of a part of it."""
        found = self._finish_submission(plan, self._query_hosts(plan), started_hosts=[])
        return found if isinstance(found, GroupHandle) else None

    def observe(self, handle: GroupHandle) -> GroupStatus:
        """Query every host. The machine of a host that does not answer is WAITING."""
        path = self._path_resolver(handle)

        def query(number: int, host: str) -> NodeStatus:
            script = render.machine_status_script(path(number, host))
            try:
                return states.parse_node_status(self._client.run_script(host, script))
            # Not GONE: only the network may have failed, while the agent continues.
            except SpotfitError as error:
                return NodeStatus(state=NodeState.WAITING, reason=error.message)

        return GroupStatus(nodes=tuple(_map_hosts(query, handle.detail["hosts"])))

    def cancel(self, handle: GroupHandle) -> None:
        """Send SIGTERM to each agent, and SIGKILL to its remaining processes after `grace_s`.

        Hosts that do not answer are skipped: their agents read in the journal that they were
        released, and the hosts cost nothing meanwhile.
        """
        path, grace_s = self._path_resolver(handle), self.options.grace_s

        def stop(number: int, host: str) -> None:
            try:
                self._client.run_script(host, render.stop_script(path(number, host), grace_s))
            except SpotfitError as error:
                log.warning("ssh.stop_failed", host=host, reason=error.message)

        _map_hosts(stop, handle.detail["hosts"])

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> list[MachineOutput]:
        """Return the output from the host, which keeps it for `render.LOG_RETENTION_DAYS`."""
        host = handle.detail["hosts"][node]
        path = self._path_resolver(handle)(node, host)
        output = self._client.run_script(host, render.tail_script(path, max_lines))
        return [MachineOutput(f"{host}:{path}/log", tuple(output.splitlines()))] if output else []

    def check_account(self, storage: str = "") -> Iterator[AccountCheck]:
        """Check the ssh command; then access, requirements and reachability of every host."""
        has_ssh = run_check("the ssh client is installed", client.find_ssh)
        yield has_ssh
        if has_ssh.passed:
            hosts = self.options.hosts
            yield from _map_hosts(
                lambda _, host: run_check(f"{host} is ready", lambda: self._check_host(host)), hosts
            )
            if len(hosts) > 1:
                yield from _map_hosts(self._check_reachability, hosts)

    def _check_reachability(self, number: int, host: str) -> AccountCheck:
        """Check whether the host reaches the next one. Optional, hence never a failed check."""
        other = self.options.hosts[(number + 1) % len(self.options.hosts)]

        def check() -> None:
            output = self._client.run_script(
                host, render.reachability_script(self._client.ssh_arguments(), other)
            )
            last_line = output.rpartition("\n")[2]
            if last_line != "reached":
                raise CheckSkippedError(f"not reachable: {last_line}")

        do = (
            f"Make `ssh -o BatchMode=yes {other} true` work on {host}. Otherwise lost hosts are "
            "replaced only while the process that called fit() runs."
        )
        return run_check(f"{host} reaches {other}", check, do=do)

    def _check_host(self, host: str) -> str:
        """Return the host's versions. Raises `ConfigError` for an incompatible Python."""
        output = self._client.run_script(host, render.check_script(self.options))
        detail = output.replace("\n", "; ")
        version = detail.removeprefix("Python ").partition(",")[0]
        caller_version = machine.python_version()
        if version.split(".")[:2] != caller_version.split(".")[:2]:
            raise ConfigError(
                f"The host {host} has Python {version}, but fit() is called from "
                f"{caller_version}: pickled functions need the same minor version.",
                do="Set SshOptions(python=…) to an interpreter of version "
                f"{'.'.join(caller_version.split('.')[:2])} on the host, or call fit() from Python "
                f"{version}.",
            )
        return detail

    # --- hosts -------------------------------------------------------------------------------

    def _query_hosts(self, plan: GroupPlan) -> dict[str, SshHostStatus | SpotfitError]:
        """Return the status or the error of every host. Raises if no host answers."""

        def query(_: int, host: str) -> SshHostStatus | SpotfitError:
            script = render.host_status_script(
                self._machine_path(host, plan.token, 0), self.options.availability_command
            )
            try:
                return states.parse_host_status(self._client.run_script(host, script))
            except SpotfitError as error:
                return error

        hosts = plan.body["hosts"]
        surveys = dict(zip(hosts, _map_hosts(query, hosts), strict=True))
        errors = [survey for survey in surveys.values() if isinstance(survey, SpotfitError)]
        if len(errors) == len(hosts):
            # A transient error is preferred: the caller then repeats the submission.
            transient = (error for error in errors if isinstance(error, InfrastructureError))
            raise next(transient, errors[0])
        return surveys

    def _start_machine(
        self, number: int, free: list[str], *, plan: GroupPlan, launch: AgentLaunchSpec
    ) -> str:
        """Start the machine on the first host that is still free; return the host, or ''.

        Removes tried hosts from `free`. A host that stops answering may have started the agent, so
        its error is raised, and the next submission finds the machine.
        """
        while free:
            host = free.pop(0)
            environment = {
                **plan.body["environment"],
                **launch.environment_for(plan.token, number, plan.slots_per_node),
            }
            path = self._machine_path(host, plan.token, number)
            script = render.start_script(path, plan.body["agent"], environment)
            if self._client.run_script(host, script) != states.BUSY:
                return host
        return ""

    def _finish_submission(
        self,
        plan: GroupPlan,
        surveys: dict[str, SshHostStatus | SpotfitError],
        *,
        started_hosts: list[str],
    ) -> GroupHandle | Refusal:
        """Return the group if every machine has a host; otherwise remove all its machines.

        Raises the error of a host on which this submission has just started a machine.
        """
        taken = _first_host_by_node(surveys, plan.num_nodes)
        is_complete = len(taken) == plan.num_nodes
        for host in started_hosts if not is_complete else ():
            if isinstance(error := surveys.get(host), SpotfitError):
                raise error
        for host, number in _known_machines(surveys):
            if not is_complete or taken.get(number) != host:
                self._client.run_script(
                    host, render.remove_script(self._machine_path(host, plan.token, number))
                )
        if not is_complete:
            return Refusal(_format_refusal(plan.num_nodes, surveys))
        detail = {
            "hosts": [taken[number] for number in range(plan.num_nodes)],
            "state_dir": self.options.state_dir,
        }
        return GroupHandle(
            token=plan.token,
            provisioner=self.name,
            name=plan.token,
            detail=detail,
            offer=offers.list_offers(self.options).offers[0].name,
        )

    def _machine_path(self, host: str, token: str, number: int) -> str:
        return render.machine_path(self.options.state_dir, host, token=token, node=number)

    def _path_resolver(self, handle: GroupHandle) -> Callable[[int, str], str]:
        # Of the handle: the options of this process may name another directory.
        state_dir = handle.detail["state_dir"]
        return lambda number, host: render.machine_path(
            state_dir, host, token=handle.name, node=number
        )


def _known_machines(surveys: Mapping[str, SshHostStatus | SpotfitError]) -> list[tuple[str, int]]:
    """Return pairs of a host and a machine of the group that it runs, in the order of hosts."""
    return [
        (host, number)
        for host, survey in surveys.items()
        if isinstance(survey, SshHostStatus)
        for number in survey.known_nodes
    ]


def _first_host_by_node(
    surveys: Mapping[str, SshHostStatus | SpotfitError], nodes: int
) -> dict[int, str]:
    """Return the host of each machine of the group; the first one if there are two."""
    taken: dict[int, str] = {}
    for host, number in _known_machines(surveys):
        if number < nodes:
            taken.setdefault(number, host)
    return taken


def _format_refusal(nodes: int, surveys: Mapping[str, SshHostStatus | SpotfitError]) -> str:
    reasons = {
        host: states.REFUSAL_REASONS[survey.state]
        if isinstance(survey, SshHostStatus)
        else survey.message
        for host, survey in surveys.items()
    }
    text = "; ".join(f"{host}: {reason}" for host, reason in reasons.items() if reason)
    return f"{nodes} free hosts are required. {text}"


def _map_hosts(function: Callable[[int, str], ResultT], hosts: Sequence[str]) -> list[ResultT]:
    """Call `function(index, host)` for all hosts concurrently; return the results in order."""
    with ThreadPoolExecutor(_MAX_CONCURRENCY) as pool:
        return list(pool.map(function, range(len(hosts)), hosts))
