"""The workers' output and the run's story, on the driver's console while it waits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from spotfit.client.story import tell
from spotfit.core.errors import NotFoundError, StoreError
from spotfit.core.ids import AgentId, Token
from spotfit.host import log
from spotfit.ledger import keys
from spotfit.model.events import Entry, NodeLost, Released, RoundOpened, ValidationBegun
from spotfit.model.output import RUN, speaker
from spotfit.model.view import View
from spotfit.model.world import Round
from spotfit.store.api import Store

Line = dict[str, Any]

REMIND_S = 30.0
_LOOKS_AT_THE_DEAD = 10


class Output:
    """Reads every node's log in the bucket from where it stopped."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next: dict[AgentId, int] = {}
        self._ended: set[AgentId] = set()
        self._looks_left: dict[AgentId, int] = {}
        """How often the dead are still asked for last words that may be on their way."""

    def watch(self, agent: AgentId) -> None:
        """That agent's workers are of interest from now on."""
        self._next.setdefault(agent, 0)

    def lose(self, agent: AgentId) -> None:
        """That agent's machine is gone: it will hardly write its last line."""
        if agent in self._next:
            self._looks_left.setdefault(agent, _LOOKS_AT_THE_DEAD)

    def new_lines(self) -> Iterator[Line]:
        """What was added since the last call, agent by agent.

        Where the store fails on the way, the lines before it are told and the others come later.
        """
        for agent in list(self._next):
            yield from self._lines_of(agent)

    @property
    def complete(self) -> bool:
        """Whether every agent of interest has written its last line."""
        return self._ended.issuperset(self._next)

    def _lines_of(self, agent: AgentId) -> Iterator[Line]:
        while agent not in self._ended:
            try:
                body = self._store.get(keys.logs(agent, self._next[agent]))
            except NotFoundError:
                self._look_less(agent)
                return
            self._next[agent] += 1
            for text in body.splitlines():
                line = msgspec.json.decode(text)
                if line.get("end"):
                    self._ended.add(agent)
                else:
                    yield line

    def _look_less(self, agent: AgentId) -> None:
        left = self._looks_left.get(agent)
        if left is None:
            return
        self._looks_left[agent] = left - 1
        if left <= 1:
            self._ended.add(agent)


class Reminder:
    """Says now and then that a run has no round, and what it waits for."""

    def __init__(self) -> None:
        self._due_at: float | None = None
        """When to say it next; None while the run is at work, or over."""

    def look(self, view: View, now: float) -> str | None:
        """What is to be said now, if it is time."""
        if view.round is not None or not view.active:
            self._due_at = None
            return None
        if self._due_at is None:
            self._due_at = now + REMIND_S
        if now < self._due_at:
            return None
        self._due_at = now + REMIND_S
        return _what_it_waits_for(view)


def _what_it_waits_for(view: View) -> str:
    assert view.spec is not None
    if view.training_ended is not None:
        return f"{len(view.unvalidated)} checkpoints are still to be validated"
    slots = sum(group.plan.slots * len(group.standing) for group in view.groups.values())
    told = f"machines for {slots} of at least {view.spec.workers_min} workers are there or to come"
    return f"{told}; the last answer was: {view.last_refusal}" if view.last_refusal else told


class Console:
    """Shows lines with the rank they come from, and the story of the run."""

    def __init__(self, store: Store, *, write: Callable[[str], object] | None = None) -> None:
        self._output = Output(store)
        self._write = write or _to_stdout
        self._reminder = Reminder()
        self._validators: dict[Token, AgentId] = {}
        """Who validated on the machine of each group."""

    def learn(self, _slot: int, _body: bytes, entry: Entry) -> None:
        """An entry of the journal."""
        log.info("run", what=tell(entry.event))
        match entry.event:
            case RoundOpened(round=opened):
                self.watch(opened)
            case ValidationBegun(agent=agent, token=token):
                self._validators[token] = agent
                self._output.watch(agent)
            case NodeLost(agent=agent) if agent is not None:
                self._output.lose(agent)
            case Released(token=token, others=others):
                for gone in (token, *others):
                    if gone in self._validators:
                        self._output.lose(self._validators[gone])
            case _:
                return

    def say(self, text: str) -> None:
        """Print that, as it is."""
        self._write(f"{text}\n")

    def remind(self, view: View, now: float) -> None:
        """Tell what a run without a round waits for, if it is time to."""
        if told := self._reminder.look(view, now):
            log.info("run.waits", what=told)

    def watch(self, round_: Round) -> None:
        """What the workers of that round write is to be shown, from their first line on."""
        for place in round_.places:
            self._output.watch(place.agent)

    def show_new(self) -> bool:
        """Print what the workers wrote since the last call; whether that was anything."""
        shown = False
        try:
            for line in self._output.new_lines():
                self._write(f"{shown_line(line)}\n")
                shown = True
        except StoreError as trouble:
            log.warning("output.unreadable", why=trouble.what)
        return shown

    @property
    def complete(self) -> bool:
        """Whether nothing more will come from the agents seen so far."""
        return self._output.complete


def shown_line(line: Line) -> str:
    """A line of a log, and who wrote it."""
    return f"({speaker(line.get('rank', RUN))}) {line.get('text', '')}"


def _to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
