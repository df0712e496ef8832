"""How a backend starts agents: the command, the environment variables and the exit codes.

`AgentLaunchSpec` writes the environment on the caller's side, `AgentAssignment` parses it on the
machine. `count_nodes` is the size calculation that every backend's `plan` begins with.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId, Token, parse_name
from spotfit.model.group import GroupRequest, Unreachable

AGENT_COMMAND = ("python", "-m", "spotfit.agent")


class AgentExitCode(enum.IntEnum):
    """Exit code of an agent process. A scheduler may requeue the agent only after `DRAINED`."""

    # Codes from 64 to 78 follow sysexits.h: EX_USAGE, EX_NOINPUT, EX_NOHOST, EX_UNAVAILABLE,
    # EX_SOFTWARE, EX_TEMPFAIL and EX_NOPERM.
    # DRAINED has a code of its own because schedulers requeue by exit code. Codes above 128 stand
    # for signals.
    DONE = 0
    """The run has ended."""
    NODE_UNUSABLE = 64
    """The assignment cannot be carried out on this machine."""
    RUN_NOT_FOUND = 66
    """The storage that this machine opens has no journal of the run."""
    LEADER_UNREACHABLE = 68
    """The leader is alive, and does not answer this machine."""
    STORAGE_UNREACHABLE = 69
    """The storage does not answer this machine."""
    CRASHED = 70
    """An error in spotfit; the agent's log has the traceback."""
    RELEASED = 75
    """The run continues without this machine."""
    STORAGE_REFUSED = 77
    """The storage refuses this machine: region, bucket, credentials or permission."""
    DRAINED = 85
    """The machine is being preempted while it is still a member of the run."""


def describe_exit_code(exit_code: int) -> str:
    """Return an agent's exit code in words, for `NodeStatus.reason`: 'exit code 1'."""
    words = _EXIT_CODE_WORDS.get(exit_code)
    return f"exit code {exit_code}" + (f": {words}" if words else "")


_EXIT_CODE_WORDS: Mapping[int, str] = {
    AgentExitCode.RUN_NOT_FOUND: "the storage_path of the run is not shared with this machine",
    AgentExitCode.LEADER_UNREACHABLE: "this machine cannot reach the leader",
    AgentExitCode.STORAGE_UNREACHABLE: "this machine cannot reach the storage",
    AgentExitCode.STORAGE_REFUSED: "the storage refuses this machine",
}
UNREACHABLE_EXIT_CODES: Mapping[Unreachable, AgentExitCode] = {
    Unreachable.STORAGE: AgentExitCode.STORAGE_UNREACHABLE,
    Unreachable.ACCESS: AgentExitCode.STORAGE_REFUSED,
    Unreachable.RUN: AgentExitCode.RUN_NOT_FOUND,
    Unreachable.LEADER: AgentExitCode.LEADER_UNREACHABLE,
}
"""Exit codes of agents that have never joined, by what they could not reach."""


def find_unreachable(exit_code: int | None) -> Unreachable | None:
    """Return what the agent with this exit code could not reach; None for other codes."""
    return next((what for what, code in UNREACHABLE_EXIT_CODES.items() if code == exit_code), None)


@dataclass(frozen=True, slots=True)
class AgentLaunchSpec:
    """How to start the agents of one run. `repr` omits the secrets."""

    run_url: str
    run_id: RunId
    secret: str = field(repr=False)
    """The run key as text. It encrypts code bundles and derives the TLS certificate of the run."""
    notice_sources: tuple[str, ...] = ("signal",)
    framework: str = ""
    """Framework that the fork server imports in advance, before the machine has read the run."""
    preload: tuple[str, ...] = field(default=(), kw_only=True)
    """Modules that it imports in addition, as in `RunSpec.preload`."""
    storage_credentials: str = field(default="", repr=False)
    """Credentials for the run's bucket if the machines have none; see `store.url`."""

    def environment_for(
        self, token: Token, node: int, slots: int, *, node_index_variable: str = ""
    ) -> dict[str, str]:
        """Return the environment variables with which a backend starts the agent of machine `node`.

        `token` is that of the group, `node` the index in it, from 0, and `slots` the number of
        workers that the machine can hold. `node_index_variable`, such as
        "AWS_BATCH_JOB_ARRAY_INDEX", names the variable in which an array scheduler passes the index
        of a machine: the agent adds its value to `node`. The result contains secrets.
        """
        # Variables without a value are left out: golden files and job sizes stay minimal.
        node_index = {"SPOTFIT_NODE_FROM": node_index_variable} if node_index_variable else {}
        credentials = (
            {"SPOTFIT_STORAGE_KEYS": self.storage_credentials} if self.storage_credentials else {}
        )
        preload = {"SPOTFIT_PRELOAD": ",".join(self.preload)} if self.preload else {}
        return (
            node_index
            | credentials
            | preload
            | {
                "SPOTFIT_RUN_URL": self.run_url,
                "SPOTFIT_RUN_ID": self.run_id,
                "SPOTFIT_RUN_SECRET": self.secret,
                # The token and the index identify the machine in the journal's events.
                "SPOTFIT_TOKEN": token,
                "SPOTFIT_NODE": str(node),
                "SPOTFIT_SLOTS": str(slots),
                "SPOTFIT_NOTICES": ",".join(self.notice_sources),
                "SPOTFIT_FRAMEWORK": self.framework,
            }
        )

    def without_secrets(self, text: str) -> str:
        """Return `text` with '***' in the place of the run key and the storage credentials.

        For output of machines that is stored in the bucket: scripts may print their environment.
        """
        secrets = [self.secret]
        with suppress(msgspec.DecodeError):
            for options in _credentials_decoder.decode(self.storage_credentials or "{}").values():
                # Shorter values are settings such as "true".
                secrets += [value for value in options.values() if len(value) >= _MIN_SECRET_CHARS]
        for secret in filter(None, secrets):
            text = text.replace(secret, "***")
        return text


_credentials_decoder = msgspec.json.Decoder(dict[str, dict[str, str]])
_MIN_SECRET_CHARS = 8


@dataclass(frozen=True, slots=True)
class AgentAssignment:
    """The parsed environment of an agent: the run, the group's token and the machine's index."""

    launch_spec: AgentLaunchSpec
    token: Token
    node: int
    """Index of the machine in its group, from 0."""
    slots: int
    """Number of workers that the machine can hold."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> AgentAssignment:
        """Parse the variables of `AgentLaunchSpec.environment_for` on the machine.

        Raises `ConfigError` for missing or malformed ones.
        """
        # All missing ones are reported at once: each attempt costs the start of a machine.
        missing = [name for name in _REQUIRED_VARIABLES if not environment.get(name)]
        if missing:
            raise ConfigError(
                f"The agent cannot start: the environment variables {', '.join(missing)} are not "
                "set.",
                do="Do not start agents by hand: a provisioner starts them. To train, call fit().",
            )
        launch = AgentLaunchSpec(
            run_url=environment["SPOTFIT_RUN_URL"],
            run_id=RunId(environment["SPOTFIT_RUN_ID"]),
            secret=environment["SPOTFIT_RUN_SECRET"],
            # '' means no source: splitting it would give one source with an empty name.
            notice_sources=tuple(
                filter(None, environment.get("SPOTFIT_NOTICES", "signal").split(","))
            ),
            framework=environment.get("SPOTFIT_FRAMEWORK", ""),
            preload=tuple(filter(None, environment.get("SPOTFIT_PRELOAD", "").split(","))),
            storage_credentials=environment.get("SPOTFIT_STORAGE_KEYS", ""),
        )
        node, slots = (
            _parse_number(environment, name) for name in ("SPOTFIT_NODE", "SPOTFIT_SLOTS")
        )
        # Array schedulers start all machines with one environment and pass the index separately.
        if node_index_variable := environment.get("SPOTFIT_NODE_FROM"):
            node += _parse_number(environment, node_index_variable)
        return cls(
            launch_spec=launch, token=Token(environment["SPOTFIT_TOKEN"]), node=node, slots=slots
        )


_REQUIRED_VARIABLES = (
    "SPOTFIT_RUN_URL",
    "SPOTFIT_RUN_ID",
    "SPOTFIT_RUN_SECRET",
    "SPOTFIT_TOKEN",
    "SPOTFIT_NODE",
    "SPOTFIT_SLOTS",
)


def _parse_number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise ConfigError(
            f"The agent cannot start: the environment variable {name}={text!r} must be a "
            "non-negative integer.",
            do=f"Do not set {name} by hand: a provisioner sets it on the machines it starts.",
        )
    return int(text)


def count_nodes(request: GroupRequest, *, slots: int, max_nodes: int, backend: str) -> int:
    """Return how many machines with `slots` workers each the request needs, for a backend's `plan`.

    `backend` is its name in error messages. Raises `ConfigError` if the request has no workers or
    an invalid token, or needs more than `max_nodes` machines.
    """
    # The token becomes part of job names and paths, so its characters are checked first.
    parse_name(request.token, what="The token")
    if request.num_workers < 1 or request.total_workers < 1:
        raise ConfigError(
            f"A group needs at least one worker: num_workers={request.num_workers}, "
            f"total_workers={request.total_workers}.",
            do="Request at least one worker: ScalingConfig(num_workers=1).",
        )
    nodes = -(-request.num_workers // slots)  # ceiling division
    if nodes > max_nodes:
        raise ConfigError(
            f"{request.num_workers} workers need {nodes} machines with {slots} workers each; "
            f"{backend} allows at most {max_nodes} machines per group.",
            do="Use fewer workers, or machines that hold more workers (workers_per_node).",
        )
    return nodes
