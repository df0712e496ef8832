"""The one command and environment every machine starts with: the contract of `spotfit.agent`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId, Token

COMMAND = ("python", "-m", "spotfit.agent")


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start the agents of one run. The secret is not shown by `repr`."""

    run_url: str
    run_id: RunId
    secret: str = field(repr=False)
    """The run's key as text: it signs payloads and makes the certificate of the wire."""
    notices: tuple[str, ...] = ("signal",)
    framework: str = ""
    """What workers will import: a machine begins with that before it knows anything else."""

    def environment(self, token: Token, node: int, slots: int) -> dict[str, str]:
        """What machine `node` of the group finds in its environment."""
        return {
            "SPOTFIT_RUN_URL": self.run_url,
            "SPOTFIT_RUN_ID": self.run_id,
            "SPOTFIT_RUN_SECRET": self.secret,
            "SPOTFIT_TOKEN": token,
            "SPOTFIT_NODE": str(node),
            "SPOTFIT_SLOTS": str(slots),
            "SPOTFIT_NOTICES": ",".join(self.notices),
            "SPOTFIT_FRAMEWORK": self.framework,
        }


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
        )
        node, slots = (_number(environment, name) for name in ("SPOTFIT_NODE", "SPOTFIT_SLOTS"))
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
    if not environment[name].isdecimal():
        raise ConfigError(f"{name} must be a whole number, not {environment[name]!r}.")
    return int(environment[name])
