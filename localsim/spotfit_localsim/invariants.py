"""What must hold after every step, whatever the world does.

The checker stands beside the bucket and the cloud and sees every change before anybody else can.
It keeps the truth: the one view that the entries really in the bucket fold to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import assert_never

import msgspec

from spotfit.core.codec import decoder
from spotfit.core.ids import AgentId, Token
from spotfit.ledger import keys
from spotfit.ledger.snapshot import Snapshot
from spotfit.model.events import (
    Blame,
    CancelRequested,
    CheckpointCommitted,
    CheckpointDropped,
    Entry,
    FitEnded,
    FitStarted,
    Intended,
    LeaderElected,
    NodeLost,
    Noticed,
    Refused,
    Released,
    RoundClosed,
    RoundOpened,
    Submitted,
    TrainingEnded,
    ValidationBegun,
    ValidationEnded,
)
from spotfit.model.fold import fold
from spotfit.model.group import GroupPlan
from spotfit.model.view import View
from spotfit.model.world import Round
from spotfit_localsim.crew import restored
from spotfit_localsim.workload import Training, score

_entries = decoder(Entry)
_snapshots = decoder(Snapshot)
_FIXED = (
    keys.JOURNAL,
    keys.SNAPSHOTS,
    ".spotfit/fn/",
    ".spotfit/code/",
    ".spotfit/reports/",
    ".spotfit/logs/",
)
_OWN = (".spotfit/beats/", keys.OFFERS)


class InvariantBroken(AssertionError):  # noqa: N818  # it is what it says
    """Something that must always hold did not; the message is the story."""


class Checker:
    """Watches one world. It never raises into what it watches: the first break ends the world."""

    def __init__(
        self,
        objects: Mapping[str, bytes],
        training: Training,
        *,
        broke: Callable[[str], None],
        wrote: Callable[[Entry], None],
    ) -> None:
        self.truth = View()
        self.bodies: list[bytes] = []
        self.views: list[View] = [self.truth]
        self.entries: list[Entry] = []
        self.broken: str | None = None
        self.intended: set[Token] = set()
        """Every token the journal ever spoke of; a view forgets those that came to nothing."""
        self.lost: set[AgentId] = set()
        """Every agent that was ever given up; a view forgets those whose machine does not stand."""
        self.deep = True
        """Whether views are compared with the truth, besides the entries they are made of."""
        self._objects = objects
        self._training = training
        self._broke = broke
        self._wrote = wrote

    @property
    def leader(self) -> str:
        """Who may decide, by the checker's own reading of the journal."""
        return self.truth.leader.leader if self.truth.leader else "nobody"

    def is_pending(self, kept: CheckpointCommitted) -> bool:
        """Whether that checkpoint is still to be validated."""
        return self.truth.active and any(one.mark == kept.mark for one in self.truth.unvalidated)

    def latest(self) -> str | None:
        """The last checkpoint that is committed."""
        return self.truth.latest_checkpoint.name if self.truth.latest_checkpoint else None

    def complain(self, what: str) -> None:
        """Something does not hold. The first complaint counts."""
        if self.broken is None:
            self.broken = what
            self._broke(what)

    # --- what agents read --------------------------------------------------------------------

    def heard(self, who: str, slot: int, body: bytes, view: View) -> None:
        """Somebody folded an entry: it must be the one in the bucket, and lead to the same view."""
        if slot >= len(self.bodies) or self.bodies[slot] != body:
            self.complain(f"{who} read an entry {slot} that was never written")
        elif self.deep and view != self.views[slot + 1]:
            self.complain(f"after entry {slot} {who} sees another run than the journal tells")

    # --- what is written to the bucket -------------------------------------------------------

    def written(self, who: str, key: str, before: bytes | None, after: bytes | None) -> None:
        """An object is about to be seen by others."""
        if after is None:
            self._removed(key)
        elif key.startswith(_FIXED) and before is not None and before != after:
            self.complain(f"{who} changed {key}, which is fixed")
        elif key.startswith(_OWN) and who != _owner(key):
            self.complain(f"{who} wrote {key}, which belongs to somebody else")
        elif before not in (None, after) and (kept := self._kept_at(key)) is not None:
            self.complain(f"{who} changed {key} of the committed checkpoint {kept}")
        elif key.startswith(keys.JOURNAL) and before is None:
            self._entered(who, key, after)
        elif key.startswith(keys.SNAPSHOTS) and before is None:
            self._photographed(who, key, after)

    def _removed(self, key: str) -> None:
        if key.startswith(keys.JOURNAL):
            self.complain(f"the entry {key} was deleted")
        elif (kept := self._kept_at(key)) is not None:
            self.complain(f"{key} of the committed checkpoint {kept} was deleted")

    def _kept_at(self, key: str) -> str | None:
        """Which committed checkpoint lies there."""
        names = (kept.name for kept in self.truth.checkpoints)
        places = ((name, (f"{name}/", f"{keys.MANIFESTS}{name}/")) for name in names)
        return next((name for name, place in places if key.startswith(place)), None)

    def _entered(self, who: str, key: str, body: bytes) -> None:
        if key != keys.entry(self.truth.next_slot):
            self.complain(f"{who} wrote {key}: a hole, the next slot is {self.truth.next_slot}")
            return
        entry = _entries.decode(body)
        self.bodies.append(body)
        self.entries.append(entry)
        self._wrote(entry)
        wrong = self._wrong_with(entry, who)
        if wrong is not None:
            self.complain(f"{who}, entry {self.truth.next_slot}: {wrong}")
        if isinstance(entry.event, Intended):
            self.intended.add(entry.event.plan.token)
        if isinstance(entry.event, NodeLost) and entry.event.agent is not None:
            self.lost.add(entry.event.agent)
        self.truth = fold(self.truth, entry)
        self.views.append(self.truth)

    def _photographed(self, who: str, key: str, body: bytes) -> None:
        view = _snapshots.decode(body).view
        if key != keys.snapshot(view.next_slot) or view != self.views[view.next_slot]:
            self.complain(f"the snapshot {key} of {who} shows another run than the journal tells")

    # --- what may be written when ------------------------------------------------------------

    def _wrong_with(self, entry: Entry, who: str) -> str | None:
        truth, event = self.truth, entry.event
        if entry.by != who:
            return f"signed by {entry.by}"
        if isinstance(event, FitStarted):
            return "a fit started while another goes on" if truth.active else None
        if isinstance(event, LeaderElected):
            return self._wrong_election(event, entry.by)
        if isinstance(event, CancelRequested):
            return None if truth.active else "nothing to cancel"
        leader = self.leader
        if entry.by != leader:
            return f"decided {type(event).__name__} while {leader} leads"
        if truth.ended is not None and not isinstance(
            event, Submitted | Refused | Released | NodeLost
        ):
            return f"{type(event).__name__} after the end"
        return self._wrong_decision(event)

    def _wrong_election(self, event: LeaderElected, by: AgentId) -> str | None:
        if by not in (event.leader, self.leader):
            return f"elected {event.leader}, and is not the one to name an heir"
        if event.epoch != self.truth.epoch + 1:
            return f"epoch {event.epoch} follows {self.truth.epoch}"
        return None

    def _wrong_decision(  # one line a kind of event
        self,
        event: Intended
        | Submitted
        | Refused
        | NodeLost
        | Released
        | Noticed
        | RoundOpened
        | RoundClosed
        | CheckpointCommitted
        | CheckpointDropped
        | ValidationBegun
        | ValidationEnded
        | TrainingEnded
        | FitEnded,
    ) -> str | None:
        truth = self.truth
        match event:
            case Intended():
                return self._wrong_intent(event)
            case Submitted(token=token) | Refused(token=token):
                pending = token in truth.groups and truth.groups[token].pending
                return None if pending else f"{token} was not pending"
            case NodeLost(token=token, node=node):
                standing = token in truth.groups and node in truth.groups[token].standing
                return None if standing else f"{token}.{node} did not stand"
            case Released(token=token, others=others):
                groups = truth.groups
                lost = [t for t in (token, *others) if t not in groups or groups[t].released]
                return f"{', '.join(lost)} was not held" if lost else None
            case Noticed():
                return None
            case RoundOpened():
                return self._wrong_round(event)
            case RoundClosed():
                return self._wrong_close(event)
            case CheckpointCommitted():
                return self._wrong_commit(event)
            case CheckpointDropped(name=name):
                return self._wrong_drop(name)
            case ValidationBegun():
                return self._wrong_validation(event)
            case ValidationEnded():
                return self._wrong_verdict(event)
            case TrainingEnded(ended=ended):
                return self._wrong_result(ended)
            case FitEnded():
                return self._wrong_end(event)
        assert_never(event)

    def _wrong_intent(self, event: Intended) -> str | None:
        truth = self.truth
        if event.plan.token in self.intended:
            return f"token {event.plan.token} was used before"
        if event.request.role == "train":
            over = truth.training_ended is not None
            return "workers' machines after the training" if over else None
        if not truth.unvalidated:
            return "a machine for validations, and nothing is to be validated"
        paid = [one for one in truth.groups.values() if one.role == "validate" and one.standing]
        spare = len(paid) - len(truth.notices)
        return f"{spare} machines for validations stand already" if spare > 0 else None

    def _wrong_round(self, event: RoundOpened) -> str | None:
        truth, opened = self.truth, event.round
        assert truth.spec is not None
        if truth.training_ended is not None:
            return f"round {opened.number} opened after the training"
        if truth.round is not None:
            return f"round {opened.number} opened beside round {truth.round.number}"
        if truth.last_round is not None and opened.number <= truth.last_round.number:
            return f"round {opened.number} comes after round {truth.last_round.number}"
        ranks = [rank for place in opened.places for rank in place.ranks]
        if ranks != list(range(opened.world_size)):
            return f"ranks {ranks}"
        if len({place.agent for place in opened.places}) < len(opened.places):
            return "an agent has two places"
        if any(place.agent in self.lost for place in opened.places):
            return "a lost agent has a place"
        if not truth.spec.workers_min <= opened.world_size <= truth.spec.workers_max:
            return f"{opened.world_size} workers"
        latest = truth.latest_checkpoint.name if truth.latest_checkpoint else None
        if opened.checkpoint != latest:
            return f"starts from {opened.checkpoint}, not {latest}"
        return self._wrong_memory(opened)

    def _wrong_memory(self, opened: Round) -> str | None:
        """Memory may only be ahead of what is committed, and must be of the last round or older."""
        state, latest = opened.memory, self.truth.latest_checkpoint
        if state is None:
            return None
        if state.step > self._training.furthest:
            return f"starts from step {state.step} in memory, which was never done"
        if state.step not in self._training.saved.get(state.round, ()):
            return f"starts from step {state.step} in memory, which was taken back"
        committed = latest.metrics["step"] if latest is not None else 0
        if state.step < committed:
            return f"starts from step {state.step} in memory, and step {committed} was committed"
        return None

    def _wrong_close(self, event: RoundClosed) -> str | None:
        if self.truth.round is None or self.truth.round.number != event.number:
            return f"round {event.number} is not open"
        mistakes = self.truth.failures.get(Blame.WORKER, 0) + 1
        if event.blame is Blame.WORKER and mistakes > self._training.crashed:
            crashed = self._training.crashed
            return f"the user is blamed {mistakes} times, for {crashed} mistakes: {event.why}"
        return None

    def _wrong_commit(self, event: CheckpointCommitted) -> str | None:
        truth = self.truth
        if truth.last_round is None or event.round > truth.last_round.number:
            return f"round {event.round} has not begun"
        for rank in event.ranks:
            if keys.manifest(event.name, event.round, rank) not in self._objects:
                return f"{event.name} has no files of rank {rank}"
        return self._wrong_files(event) or self._wrong_progress(event)

    def _wrong_files(self, event: CheckpointCommitted) -> str | None:
        kept = restored(self._objects, event.name)
        if isinstance(kept, str):
            return f"{event.name}: {kept}"
        if kept.link != self._training.chain.at(kept.step).link:
            return f"{event.name}: step {kept.step} is not that of the undisturbed run"
        told = event.metrics.get("step")
        if told != kept.step:
            return f"{event.name} holds step {kept.step}, told as {told}"
        if event.validation != self._training.asks(kept.step):
            return f"{event.name} is to be validated: {event.validation}"
        return None

    def _wrong_progress(self, event: CheckpointCommitted) -> str | None:
        latest = self.truth.latest_checkpoint
        if latest is not None and event.metrics["step"] <= latest.metrics["step"]:
            return f"step {event.metrics['step']} is committed after step {latest.metrics['step']}"
        return None

    def _wrong_drop(self, name: str) -> str | None:
        latest = self.truth.latest_checkpoint
        if latest is None or name not in {kept.name for kept in self.truth.checkpoints}:
            return f"{name} was not there to be dropped"
        if name in {kept.name for kept in self.truth.unvalidated}:
            return f"{name} is still to be validated"
        return f"{name} is the latest" if name == latest.name else None

    def _wrong_validation(self, event: ValidationBegun) -> str | None:
        truth, current = self.truth, self.truth.validation
        due = truth.unvalidated[0].mark if truth.unvalidated else None
        if event.mark != due:
            return f"{event.mark} is validated, and {due} is next"
        if event.attempt != truth.attempts + 1:
            return f"attempt {event.attempt} follows {truth.attempts}"
        group = truth.groups.get(event.token)
        if event.agent in truth.lost_agents or group is None or not group.stands(event.node):
            return f"{event.agent} cannot validate"
        if current is None:
            return None
        held = truth.groups.get(current.token)
        gone = held is None or not held.stands(current.node) or current.agent in truth.lost_agents
        return None if gone else f"{current.agent} validates {current.mark} already"

    def _wrong_verdict(self, event: ValidationEnded) -> str | None:
        due = self.truth.unvalidated[0] if self.truth.unvalidated else None
        if due is None or due.mark != event.mark:
            return f"{event.mark} was not to be validated"
        if event.status == "validated":
            found = score(due.metrics["step"])
            right = event.metrics == {"score": found}
            return None if right else f"{event.metrics} was found, and {found} is the score"
        return f"{event.metrics} of a validation that did not succeed" if event.metrics else None

    def _wrong_end(self, event: FitEnded) -> str | None:
        truth = self.truth
        if not truth.active:
            return "a fit that does not go on cannot end"
        if truth.unvalidated and event.outcome == "finished":
            return f"{len(truth.unvalidated)} checkpoints are still to be validated"
        if truth.training_ended is not None and event.outcome != "cancelled":
            before = truth.training_ended
            return None if event == before else f"it was to end {before.outcome}: {before.why}"
        return self._wrong_result(event)

    def _wrong_result(self, event: FitEnded) -> str | None:
        if event.outcome != "finished":
            return None
        result = self._objects.get(event.result_key or "", b"")
        if not result.endswith(self._training.result.link.encode()):
            return f"the result {result!r} is not that of the undisturbed run"
        return None

    # --- machines ----------------------------------------------------------------------------

    def requested(self, plan: GroupPlan) -> None:
        """The cloud is about to make machines: the journal must have said so before.

        A request that a deposed leader sends late may since have been written down as refused; its
        machines find that out and leave by themselves.
        """
        if plan.token not in self.intended:
            self.complain(f"machines for {plan.token}, of which the journal knows nothing")

    # --- the end -----------------------------------------------------------------------------

    def at_the_end(self, outcome: str) -> None:
        """The world is at rest: is everything as it should be?"""
        ended = self.truth.ended
        if ended is None:
            self.complain("the run did not end")
        elif ended.outcome != outcome:
            self.complain(f"the run ended {ended.outcome} ({ended.why}), it should have {outcome}")
        for kept in self.truth.checkpoints:
            found = restored(self._objects, kept.name)
            if isinstance(found, str):
                self.complain(f"the committed checkpoint {kept.name} is lost: {found}")
        if ended is not None and ended.outcome == "finished":
            self._count_verdicts()

    def _count_verdicts(self) -> None:
        """Every validation that was asked for has ended, and once."""
        events = [entry.event for entry in self.entries]
        asked = [
            one.mark for one in events if isinstance(one, CheckpointCommitted) and one.validation
        ]
        ended = [one.mark for one in events if isinstance(one, ValidationEnded)]
        if ended != asked:
            self.complain(f"to be validated were {asked}, and these were: {ended}")


def _owner(key: str) -> str:
    return key.rpartition("/")[2].removesuffix(".json")


def reads_like_the_undisturbed(metrics: Mapping[str, object] | None, training: Training) -> bool:
    """Whether those metrics are a state of the undisturbed run."""
    if metrics is None:
        return False
    step = msgspec.convert(metrics.get("step"), int)
    return metrics.get("link") == training.chain.at(step).link
