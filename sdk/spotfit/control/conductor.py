"""Look, judge, act: the loop of whoever leads, one decision at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import assert_never

from spotfit.control.errands import Done, Errands
from spotfit.control.scribe import Scribe
from spotfit.core.errors import ProvisionError, SpotfitError
from spotfit.core.ids import Token
from spotfit.host import log
from spotfit.model.events import Event, Intended, NodeLost, Refused, Released, Submitted
from spotfit.model.group import GroupHandle, GroupRequest, GroupStatus, NodeState
from spotfit.model.watch import Watch
from spotfit.policy.actions import Order, Release, Rest, Submit, Wait, Write
from spotfit.policy.conduct import conduct
from spotfit.provision.api import Provisioner, Refusal
from spotfit.provision.launch import Launch

_SOON_S = 0.05
_LONGEST_PAUSE_S = 30.0


class Conductor:
    """Carries out judgement for the leader of one run. Safe to lose at any moment."""

    def __init__(
        self,
        scribe: Scribe,
        provisioner: Provisioner,
        launch: Launch,
        errands: Errands,
        new_token: Callable[[], str],
    ) -> None:
        self._scribe = scribe
        self._provisioner = provisioner
        self._launch = launch
        self._errands = errands
        self._new_token = new_token
        self._observed_at: float | None = None
        self._look_began = float("-inf")
        self._unseen: tuple[Token, ...] = ()
        """Groups the backend is being asked about."""
        self.statuses: dict[Token, GroupStatus] = {}
        self.seen: dict[Token, float] = {}
        """As of when each of them is surely true: the backend may be late with its word."""
        self.granted: dict[Token, float] = {}
        """When each group was first seen to have a running machine."""
        self.refused_at: float | None = None
        """When the market last refused, or gave a machine that died at birth."""
        self.validator_refused_at: float | None = None
        """The same of machines for validations."""
        self._cancelled: set[Token] = set()
        self.resting = False
        self._tries: dict[Token, int] = {}
        self._again_at: dict[Token, float] = {}

    def step(self, watch: Watch, now: float) -> tuple[bool, Wait]:
        """Judge once and act. True if the world has changed and must be judged again at once, or as
        soon as the scribe is `settled` again. Only while it is."""
        action = conduct(self._scribe.view, watch, now)
        match action:
            case Wait():
                return False, action
            case Rest(why=why):
                self.resting = True
                return False, Wait(now + 3600.0, why)
            case Write(event=event):
                if isinstance(event, NodeLost) and event.agent is None:
                    self._note_refusal(event.token, now)
                self._scribe.write(event, now)
                return True, _at_once(now)
            case Order():
                self._intend(action, now)
                return True, _at_once(now)
            case Submit(token=token):
                return self._submit(token, now)
            case Release(token=token, others=others):
                return self._release((token, *others), now)
        assert_never(action)

    def observe(self, now: float, *, every_s: float) -> None:
        """Ask the backend about every group that may still cost or bring something."""
        held = self._held()
        if not self._unseen:
            if self._observed_at is not None and now - self._observed_at < every_s:
                return
            self._observed_at = self._look_began = now
            self._unseen = tuple(held)
        self._unseen = tuple(
            token for token in self._unseen if token in held and not self._see(token, held, now)
        )

    @property
    def sees_nobody(self) -> bool:
        """Whether there are groups, and the backend says of each that no machine of it is left."""
        if any(group.pending for group in self._scribe.view.groups.values()):
            return False
        seen = [self.statuses.get(token) for token in self._held()]
        return bool(seen) and all(status is not None and status.over for status in seen)

    def _held(self) -> dict[Token, GroupHandle]:
        """Groups that were granted and not let go."""
        return {
            token: group.handle
            for token, group in self._scribe.view.groups.items()
            if group.handle is not None and not group.released
        }

    def _see(self, token: Token, held: Mapping[Token, GroupHandle], now: float) -> bool:
        """Whether the backend has answered."""
        look = partial(self._provisioner.observe, held[token])
        done = self._errands.run(f"observe {token}", look)
        if done is not None and done.error is None:
            self._note(token, done.value, now)
        return done is not None

    def _note(self, token: Token, status: GroupStatus, now: float) -> None:
        told_late_s = self._provisioner.traits.told_late_s
        self.seen = {**self.seen, token: self._look_began - told_late_s}
        known = self.statuses.get(token)
        if status.refusal and (known is None or known.refusal != status.refusal):
            log.warning("group.waits", token=token, why=status.refusal)
        if known != status:
            self.statuses = {**self.statuses, token: status}
        if token not in self.granted and any(n.state == NodeState.RUNNING for n in status.nodes):
            self.granted = {**self.granted, token: now}

    def observe_soon(self) -> None:
        """Something happened that the backend may know more about."""
        self._observed_at = None

    def _note_refusal(self, token: Token, now: float) -> None:
        if self._scribe.view.groups[token].role == "validate":
            self.validator_refused_at = now
        else:
            self.refused_at = now

    def _intend(self, order: Order, now: float) -> None:
        spec = self._scribe.view.spec
        assert spec is not None
        resources = spec.resources_per_worker
        if order.role == "validate" and spec.validation is not None:
            resources = spec.validation.resources
        request = GroupRequest(
            token=Token(self._new_token()),
            workers=order.workers,
            of=1 if order.role == "validate" else spec.workers_max,
            resources_per_worker=resources,
            run_url=self._launch.run_url,
            run_name=spec.name,
            role=order.role,
        )
        intended = Intended(request, self._provisioner.plan(request), order.why)
        self._scribe.write(intended, now)

    def _submit(self, token: Token, now: float) -> tuple[bool, Wait]:
        again_at = self._again_at.get(token, now)
        if now < again_at:
            return False, Wait(again_at, "the backend failed; it is asked again")
        plan = self._scribe.view.groups[token].plan
        done = self._errands.run(
            f"submit {token}", lambda: self._provisioner.submit(plan, self._launch)
        )
        if done is None:
            return False, Wait(now + _SOON_S, f"asking for {plan.nodes} machines")
        if done.error is not None and not isinstance(done.error, ProvisionError):
            return self._ask_again(token, done.error, now)
        self._scribe.write(self._outcome(token, done, now), now)
        self.observe_soon()
        return True, _at_once(now)

    def _ask_again(self, token: Token, error: Exception, now: float) -> tuple[bool, Wait]:
        """Whether the cloud heard us is unknown: asking with a new token could pay twice."""
        tries = self._tries[token] = self._tries.get(token, 0) + 1
        pause_s = min(_LONGEST_PAUSE_S, 0.1 * 2.0 ** min(tries, 10))
        again_at = self._again_at[token] = now + pause_s
        log.warning("submit.unanswered", token=token, tries=tries, why=_told(error))
        return False, Wait(again_at, f"asking again: {_told(error)}")

    def _outcome(self, token: Token, done: Done, now: float) -> Event:
        if done.error is not None:
            return Refused(token, _told(done.error), final=True)
        if isinstance(done.value, Refusal):
            self._note_refusal(token, now)
            return Refused(token, done.value.why, done.value.final)
        return Submitted(token, done.value)

    def _release(self, tokens: tuple[Token, ...], now: float) -> tuple[bool, Wait]:
        """All at once where the errands are: a big run ends as quickly as a small one."""
        open_: list[Token] = []
        trouble = ""
        for token in tokens:
            handle = self._scribe.view.groups[token].handle
            if token in self._cancelled or handle is None:
                continue
            done = self._errands.run(f"release {token}", partial(self._provisioner.cancel, handle))
            if done is None:
                open_.append(token)
            elif done.error is not None:
                trouble = f"cannot let {token} go yet: {_told(done.error)}"
            else:
                self._cancelled.add(token)
        if open_:
            return False, Wait(now + _SOON_S, f"letting {len(open_)} groups go")
        gone = [token for token in tokens if token in self._cancelled]
        if not gone:
            return False, Wait(now + 2.0, trouble)
        self._scribe.write(Released(gone[0], tuple(gone[1:])), now)
        return True, _at_once(now)


def _at_once(now: float) -> Wait:
    return Wait(now, "the journal has moved")


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, SpotfitError) else f"{type(error).__name__}: {error}"
