"""What an agent asks of its machine beyond the wire and the workers."""

from __future__ import annotations

from typing import Protocol

from spotfit.agent.ports import Assessor, Audience, Hooks
from spotfit.control.errands import Errands
from spotfit.model.spec import RunSpec
from spotfit.provision.api import Provisioner


class Workplace(Protocol):
    """The machine's services, as the agent's driver or the simulator offers them."""

    def provisioner(self, spec: RunSpec) -> Provisioner:
        """The backend of that run, for the one who leads."""
        ...

    def audience(self, spec: RunSpec) -> Audience | None:
        """A process for the run's callbacks, if it has any."""
        ...

    def hooks(self, spec: RunSpec) -> Hooks | None:
        """A process for the hooks of the run's backend, if it has any."""
        ...

    def resign(self) -> None:
        """Nobody leads from here any more: end the processes of callbacks and hooks."""
        ...

    def say(self, text: str) -> None:
        """A line of the run's own in its log."""
        ...

    def assessor(self) -> Assessor:
        """The one who validates checkpoints on this machine."""
        ...

    def errands(self) -> Errands:
        """Somebody for slow calls."""
        ...

    def journal_errands(self) -> Errands:
        """Somebody for the journal and the lease alone: these never wait behind a slow cloud."""
        ...

    def seal(self, payload: bytes, purpose: str) -> bytes:
        """An envelope only the run's key can make, or open."""
        ...

    def new_token(self) -> str:
        """A name for a request that was never used."""
        ...

    def name_for(self, report: int) -> str:
        """A directory name for a checkpoint that was given none."""
        ...
