"""RunHandle: a run as somebody outside it sees it, from any process and any machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotfit.checkpoint.handle import Address
from spotfit.client.failure import error_of
from spotfit.client.follow import Console, Output, shown_line
from spotfit.client.keyring import Keyring
from spotfit.client.machines import ALL, last_words, printed
from spotfit.client.result import Result, result_of
from spotfit.client.story import no_run_at
from spotfit.control.caretaker import Caretaker
from spotfit.control.conductor import Conductor
from spotfit.control.errands import Inline
from spotfit.control.scribe import Scribe
from spotfit.core.errors import SpotfitError, StoreError
from spotfit.core.ids import AgentId, RunId
from spotfit.host import clocks, dice, log
from spotfit.ledger.journal import check_whole
from spotfit.ledger.run import Ledger
from spotfit.model.events import Blame, CancelRequested, Entry, FitEnded, FitStarted, NodeLost
from spotfit.model.spec import RunSpec
from spotfit.model.view import View
from spotfit.provision.launch import Launch
from spotfit.provision.registry import open_provisioner
from spotfit.ship.function import load_pickle
from spotfit.ship.sign import RunKey
from spotfit.store.opening import keys_for_machines, open_store

_LAST_WORDS_S = 3.0
_CLOUDS_ARE_LATE_S = 10.0
"""Between what a machine prints and what its cloud tells of it."""
_LONGEST_PAUSE_S = 0.5
_TIDYING_S = 120.0
_TIDY_AT_ONCE_S = 10.0
_CANCEL_AGAIN_S = 0.2


@dataclass(frozen=True)
class RunStatus:
    """A run at a glance."""

    name: str
    state: str
    """'waiting' for machines, 'running', 'validating', 'finished', 'failed' or 'cancelled'."""
    round: int | None
    workers: int
    machines: int
    checkpoints: tuple[str, ...]
    failures: dict[str, int]
    why: str = ""
    saved_why: str = ""
    """Why the latest checkpoint was saved just then, where a Checkpointer did."""


class RunHandle:
    """Follow, ask, cancel; the run goes on without it.

    While the handle waits it also minds the run: should every machine be lost at once, it asks
    for new ones. That needs the run's key, which lies on the machine that started the run.
    """

    def __init__(
        self, ledger: Ledger, key: RunKey | None, *, within: Address | None = None
    ) -> None:
        self._ledger = ledger
        self.key = key
        self._within = within
        self._clock = clocks.SystemClock()
        self._news_at = self._clock.now()
        self._console = Console(ledger.store)
        self.show = False
        """Whether the workers' output and the run's story go to the console."""
        self._fits = 0
        self._ended: FitEnded | None = None
        self._final: View | None = None
        ledger.listen(self._heard)
        self.caretaker: Caretaker | None = None
        """Steps in when nobody else can; None where the run's key is not at hand."""
        self._minder: threading.Thread | None = None
        self._broken: Exception | None = None
        """What ended the minding thread before its time."""
        self._left = False
        """Whether nobody watches any more who once did."""
        self._ended_at = 0.0
        self._unheard_at: float | None = None
        """When a machine was first told to have gone without a word; its words are shown once."""

    @property
    def url(self) -> str:
        """Where the run lies; `spotfit.attach(url)` finds it again."""
        return self._ledger.store.url

    def status(self) -> RunStatus:
        """The run as it is now."""
        return _status(self._ledger.catch_up() if self._minder is None else self._ledger.view)

    def cancel(self, why: str = "cancel() was called") -> None:
        """Ask the run to end; machines are let go. Of a run that has ended, nothing happens."""
        ledger = self._ledger.another()  # ours may be in the hands of the thread that waits
        while (view := ledger.catch_up()).active and view.cancelled is None:
            if ledger.append(CancelRequested(why), after=view).cancelled is None:
                self._clock.wait(_CANCEL_AGAIN_S)

    def logs(self) -> Iterator[str]:
        """Every line the workers wrote so far, with its rank."""
        output = Output(self._ledger.store)
        for offer in self._ledger.offers():
            output.watch(offer.agent)
        for line in output.new_lines():
            yield shown_line(line)

    def machine_logs(self, machine: str = ALL, *, last: int = 200) -> Iterator[str]:
        """What machines printed before and beside their workers, as their backend kept it.

        `machine` is the name that the story gives it ('t-…/0'), its number in the order in which
        machines were granted, or 'all'. Clouds tell of a line some seconds late, and forget.
        """
        return printed(self._ledger.store, machine, last=last)

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the end. Raises what `fit()` raises, or `TimeoutError`."""
        self._wait(timeout_s)
        return self.outcome()

    def outcome(self) -> Result:
        """What came of a run that has ended. Raises what `fit()` raises."""
        ended, view = self._ended, self._final
        assert ended is not None
        assert view is not None
        if ended.outcome != "finished":
            raise self._error(ended)
        if ended.unsaved:
            log.warning("result.unsaved", what="the last save is no checkpoint", why=ended.unsaved)
        returned = self._returned(ended)
        return result_of(view, self._ledger.store, returned, within=self._within)

    def _error(self, ended: FitEnded) -> SpotfitError:
        """What is raised; with the last words of machines that never spoke, where those may be
        the reason."""
        error = error_of(ended, self._ledger.store, self.key)
        of_machines = ended.outcome == "failed" and ended.blame is not Blame.WORKER
        if of_machines and (words := last_words(self._ledger)):
            error.add_note(words)
        return error

    # --- waiting -----------------------------------------------------------------------------

    def mind(self) -> None:
        """Take the first steps now: machines are asked for before this returns."""
        self._tick()

    def tidy(self) -> None:
        """After a cancel: wait a moment for the machines to be let go."""
        self._follow(_TIDY_AT_ONCE_S)

    def mind_in_background(self) -> None:
        """Go on minding the run from a thread, for as long as this process lives."""
        self._minder = threading.Thread(target=self._mind, name="spotfit-minder", daemon=True)
        self._minder.start()

    def _mind(self) -> None:
        try:
            self._follow()
        except Exception as error:  # noqa: BLE001 - the border of a thread: told by `result()`
            self._broken = error

    def watch(self) -> None:
        """Wait for the end, showing the workers' output and the run's story.

        The minding is a thread's: a bucket that hangs must not keep the caller from hearing Ctrl-C.
        """
        self.show = True
        self.mind_in_background()
        assert self._minder is not None
        try:
            while (
                self._minder.is_alive()
            ):  # a signal that another thread caught is heard in between
                self._minder.join(_LONGEST_PAUSE_S)
        finally:
            self._left = True
        if self._broken is not None:
            raise self._broken

    def _wait(self, timeout_s: float | None) -> None:
        if self._minder is not None:
            self._minder.join(timeout_s)
            if self._broken is not None:
                raise self._broken
        else:
            self._follow(timeout_s)
        if self._ended is None:
            raise TimeoutError(f"The run {self.url} has not ended within {timeout_s} s.")

    def _follow(self, timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else self._clock.now() + timeout_s
        while not self._left:
            wake = self._tick()
            if self.show and self._console.show_new():
                self._news_at = self._clock.now()
            now = self._clock.now()
            if self.show:
                self._console.remind(self._ledger.view, now)
                self._show_last_words(now)
            if wake is None or self._gives_up_tidying(now):
                break
            if deadline is not None and now >= deadline:
                return
            wake = min(wake, now + self._pause_s(now), deadline or wake)
            self._clock.wait(max(0.0, wake - now))
        self._hear_last_words()

    def _tick(self) -> float | None:
        """One look at the run; when to look again, or None when it is over."""
        now = self._clock.now()
        try:
            wake = self.caretaker.tick(now) if self.caretaker else self._look(now)
        except StoreError as trouble:
            log.warning("store.trouble", why=trouble.what)
            return now + 1.0
        if self._ended is not None and wake is None:
            return None
        return now + 1.0 if wake is None else wake

    def _gives_up_tidying(self, now: float) -> bool:
        """A result must not wait for ever for machines that cannot be let go."""
        if self._ended is None or now - self._ended_at < _TIDYING_S:
            return False
        groups = self._ledger.view.groups
        left = [token for token, group in groups.items() if not group.let_go]
        log.error("run.left_behind", groups=",".join(left), what="see whether these still cost")
        return True

    def _pause_s(self, now: float) -> float:
        """Short after news, longer the longer nothing happens: looking costs the workers' time."""
        poll_s = self._ledger.view.spec.tempo.poll_s if self._ledger.view.spec else 1.0
        return min(max(poll_s, (now - self._news_at) / 8), max(poll_s, _LONGEST_PAUSE_S))

    def _look(self, now: float) -> float | None:
        self._ledger.catch_up()
        return None if self._ended is not None else now + 1.0

    def _show_last_words(self, now: float) -> None:
        """What the first machine printed that went without a word: what is wrong with one is wrong
        with the next. A cloud takes a moment to know it."""
        if self._unheard_at is None or now - self._unheard_at < _CLOUDS_ARE_LATE_S:
            return
        self._unheard_at = float("inf")
        if words := last_words(self._ledger, most=1):
            self._console.say(words)

    def _hear_last_words(self) -> None:
        deadline = self._clock.now() + _LAST_WORDS_S
        while self.show and not self._console.complete and self._clock.now() < deadline:
            self._console.show_new()
            self._clock.wait(0.02)

    # --- the journal -------------------------------------------------------------------------

    def know(self, view: View) -> None:
        """Begin from a view that was read before anybody listened."""
        self._ended, self._final = view.ended, view if view.ended else None
        self._ended_at = self._clock.now()
        round_ = view.last_round if view.ended else view.round
        if round_ is not None:
            self._console.watch(round_)

    def _heard(self, slot: int, body: bytes, entry: Entry) -> None:
        self._news_at = self._clock.now()
        if isinstance(entry.event, FitStarted):
            self._ended = self._final = None
        if isinstance(entry.event, NodeLost) and entry.event.agent is None:
            self._unheard_at = self._unheard_at or self._news_at
        if isinstance(entry.event, FitEnded):
            self._ended, self._final = entry.event, self._ledger.view
            self._ended_at = self._clock.now()
        if self.show:
            self._console.learn(slot, body, entry)

    def _returned(self, ended: FitEnded) -> Any:
        if ended.result_key is None:
            return None
        if self.key is None:
            log.warning("result.unread", why="this machine does not hold the run's key")
            return None
        envelope = self._ledger.store.get(ended.result_key)
        return load_pickle(envelope, self.key, purpose=ended.result_key)


def attach(url: str | Path) -> RunHandle:
    """The run at `<storage_path>/<name>`, whoever started it.

    Raises `RunNotFoundError`, or `JournalError` for a journal that cannot be believed.
    """
    ledger = ledger_at(url)
    view = ledger.view
    assert view.spec is not None
    handle = RunHandle(ledger, None)
    handle.know(view)
    return adopted(handle, ledger, Keyring().find(ledger.run_id), view.spec)


def ledger_at(url: str | Path) -> Ledger:
    """What the run at `<storage_path>/<name>` has written down, read to its end.

    Raises `RunNotFoundError`, or `JournalError` for a journal that cannot be believed.
    """
    store = open_store(url)
    ledger = Ledger(store, RunId(""), AgentId(f"d{dice.new_agent_id()}"), wall_ms=clocks.wall_ms)
    check_whole(store)
    view = ledger.catch_up()
    if view.run_id is None or view.spec is None:
        raise no_run_at(store)
    ledger.run_id = view.run_id
    return ledger


def adopted(handle: RunHandle, ledger: Ledger, key: RunKey | None, spec: RunSpec) -> RunHandle:
    """The handle, with the power to mind the run if its key is here."""
    if key is None:
        return handle
    handle.key = key
    try:
        provisioner = open_provisioner(spec.provisioner, spec.provisioner_options)
    except SpotfitError as cannot:
        log.warning("run.unminded", why=cannot.what)
        return handle
    traits = provisioner.traits
    launch = Launch(
        spec.storage_url,
        ledger.run_id,
        key.to_text(),
        traits.notices,
        spec.framework,
        keys_for_machines(ledger.store),
    )
    scribe = Scribe(ledger, Inline())
    conductor = Conductor(scribe, provisioner, launch, Inline(), dice.new_token)
    handle.caretaker = Caretaker(scribe, conductor, clocks.SystemClock().now())
    return handle


def _state(view: View) -> str:
    if view.ended is not None:
        return view.ended.outcome
    if view.training_ended is not None:
        return "validating"
    return "running" if view.round else "waiting"


def _status(view: View) -> RunStatus:
    state = _state(view)
    return RunStatus(
        name=view.spec.name if view.spec else "",
        state=state,
        round=view.round.number if view.round else None,
        workers=view.round.world_size if view.round else 0,
        machines=sum(len(group.standing) for group in view.groups.values()),
        checkpoints=tuple(kept.name for kept in view.checkpoints),
        failures={blame.value: count for blame, count in view.failures.items()},
        why=view.ended.why if view.ended else view.last_refusal or "",
        saved_why=view.checkpoints[-1].why if view.checkpoints else "",
    )
