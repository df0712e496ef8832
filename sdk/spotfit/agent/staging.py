"""A round's way through the hooks of the user's backend, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping

from spotfit.agent.collectives import Answer
from spotfit.agent.hub import Hub
from spotfit.agent.ports import Hooks
from spotfit.model.hooks import Hook
from spotfit.model.wire import Call, Proceed, Stage

_WAY: tuple[tuple[Hook, Stage], ...] = (
    ("on_start", "form"),
    ("on_training_start", "train"),
    ("on_shutdown", "leave"),
)
"""Each hook, and the stage that all workers wait to begin until it was performed."""


class Staging:
    """One round: when all workers wait for a stage, its hook is performed; then they proceed."""

    def __init__(self, hub: Hub, hooks: Hooks, resources: Mapping[str, float]) -> None:
        self._hub = hub
        self._hooks = hooks
        self._resources = resources
        self._gone = 0
        """How many stages were begun."""
        self._asked = False

    @property
    def done(self) -> bool:
        """Whether its last hook was performed."""
        return self._gone == len(_WAY)

    def step(self) -> list[Answer]:
        """What the workers are to be told now, by the hooks or because of them."""
        self._pass_outcomes()
        return [*self._calls(), *self._proceed()]

    def lose_workers(self) -> None:
        """The round is lost: a hook that calls its workers shall not wait for them."""
        self._hooks.over(self._hub.round)

    def close(self) -> None:
        """The round is over. A backend that was started is shut down, though nobody is left."""
        self._hooks.over(self._hub.round)
        if self._gone and not self.done and not self._shutting_down:
            self._perform("on_shutdown")

    @property
    def _shutting_down(self) -> bool:
        return self._asked and _WAY[self._gone][0] == "on_shutdown"

    def _pass_outcomes(self) -> None:
        while self._hub.outcomes:
            self._hooks.answered(self._hub.round, *self._hub.outcomes.popleft())

    def _calls(self) -> list[Answer]:
        everybody = tuple(range(self._hub.world_size))
        answers: list[Answer] = []
        for ask in self._hooks.asks():
            ranks: tuple[int | None, ...] = (None,) if ask.ranks == everybody else ask.ranks
            if ask.round == self._hub.round:
                answers += [(rank, Call(ask.call, ask.body)) for rank in ranks]
        return answers

    def _proceed(self) -> list[Answer]:
        if self.done:
            return []
        hook, stage = _WAY[self._gone]
        if not self._asked:
            self._asked = self._hub.all_present(stage)
            if self._asked:
                self._perform(hook)
        if not self._asked or not self._hooks.performed(hook, self._hub.round):
            return []
        self._gone, self._asked = self._gone + 1, False
        return [(None, Proceed(stage))]

    def _perform(self, hook: Hook) -> None:
        self._hooks.perform(hook, self._hub.round, self._hub.world_size, self._resources)
