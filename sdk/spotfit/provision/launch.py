"""The one command and environment every machine starts with: the contract of `spotfit.agent`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId, Token

COMMAND = ("python", "-m", "spotfit.agent")


class Exit(enum.IntEnum):
    """How an agent ends. A scheduler may start it again after `DRAINED`, and only then."""

    DONE = 0
    """The run is over, and this machine with it."""
    REFUSED = 64
    """What it was told to do cannot be done here."""
    CRASHED = 70
    """A fault of ours; the log has the traceback."""
    GIVEN_UP = 75
    """The run goes on without this machine."""
    DRAINED = 85
    """The machine is about to be taken away, and the run still counted on it."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start the agents of one run. The secret is not shown by `repr`."""

    run_url: str
    run_id: RunId
    secret: str = field(repr=False)
    """The run's key as text: it seals payloads and makes the certificate of the wire."""
    notices: tuple[str, ...] = ("signal",)
    framework: str = ""
    """What workers will import: a machine begins with that before it knows anything else."""
    storage_keys: str = field(default="", repr=False)
    """Credentials of the run's bucket where machines have none of their own; see
    `store.credentials`."""

    def environment(
        self, token: Token, node: int, slots: int, *, node_from: str = ""
    ) -> dict[str, str]:
        """What machine `node` of the group finds in its environment.

        A scheduler that gives all machines the same environment says in a variable of its own
        which one it is: that variable is `node_from`, and its number is added to `node`.
        """
        which = {"SPOTFIT_NODE_FROM": node_from} if node_from else {}
        keys = {"SPOTFIT_STORAGE_KEYS": self.storage_keys} if self.storage_keys else {}
        return (
            which
            | keys
            | {
                "SPOTFIT_RUN_URL": self.run_url,
                "SPOTFIT_RUN_ID": self.run_id,
                "SPOTFIT_RUN_SECRET": self.secret,
                "SPOTFIT_TOKEN": token,
                "SPOTFIT_NODE": str(node),
                "SPOTFIT_SLOTS": str(slots),
                "SPOTFIT_NOTICES": ",".join(self.notices),
                "SPOTFIT_FRAMEWORK": self.framework,
            }
        )


@dataclass(frozen=True, slots=True)
class Assignment:
    """A machine's side of `Launch.environment`: what its agent is to do."""

    launch: Launch
    token: Token
    node: int
    slots: int

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Assignment:
        """Parse. Raises `ConfigError` naming the variables that are missing or malformed."""
        missing = [name for name in _NEEDED if not environment.get(name)]
        if missing:
            raise ConfigError(
                f"This machine was not told what to do: {', '.join(missing)} not set.",
                do="Agents are started by a provisioner; to train, call fit().",
            )
        launch = Launch(
            environment["SPOTFIT_RUN_URL"],
            RunId(environment["SPOTFIT_RUN_ID"]),
            environment["SPOTFIT_RUN_SECRET"],
            tuple(filter(None, environment.get("SPOTFIT_NOTICES", "signal").split(","))),
            environment.get("SPOTFIT_FRAMEWORK", ""),
            environment.get("SPOTFIT_STORAGE_KEYS", ""),
        )
        node, slots = (_number(environment, name) for name in ("SPOTFIT_NODE", "SPOTFIT_SLOTS"))
        if node_from := environment.get("SPOTFIT_NODE_FROM"):
            node += _number(environment, node_from)
        return cls(launch, Token(environment["SPOTFIT_TOKEN"]), node, slots)


_NEEDED = (
    "SPOTFIT_RUN_URL",
    "SPOTFIT_RUN_ID",
    "SPOTFIT_RUN_SECRET",
    "SPOTFIT_TOKEN",
    "SPOTFIT_NODE",
    "SPOTFIT_SLOTS",
)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"{name} must be a whole number, not {text!r}.")
    return int(text)
