"""`MarketRecord`: what a run has observed of its offers, its progress and its starts.

It is folded from the journal, so that every leader decides from the same figures. Its times are
those of `JournalView.elapsed_s`: durations of several leaders are added, and no clocks of two
machines are compared. Only starts are measured by the storage's clock as well, for a deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from spotfit.core.ids import Token
from spotfit.model.events import (
    CheckpointCommitted,
    DeadlineAtRisk,
    FailureCause,
    FitEnded,
    GroupPlanned,
    GroupRefused,
    GroupsReleased,
    GroupWaiting,
    JournalEvent,
    MachinesChosen,
    MachinesObserved,
    MachineTimes,
    NodeLost,
    PricesChanged,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    TrainingFunctionStarted,
)
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Offer, Price

# Enough for a high quantile; a run of weeks must not keep the durations of its first day.
MAX_MEASUREMENTS = 8


class OfferRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the run has observed of one offer."""

    refusals: int = 0
    """Consecutive refused requests."""
    refused_since_s: float | None = None
    """When the first of them was refused; None without any."""
    refused_at_s: float = 0.0
    """When the last of them was refused."""
    final_refusal: str = ""
    """The reason of a refusal that a new request is likely to meet as well; '' if there is none."""
    complete_s: float = 0.0
    """When enough of its machines last ran for a move to it, see `View.is_move_complete`.

    As of the last loss, choice, release or end of a round; 0 if they never did.
    """
    incomplete_moves: int = 0
    """How often a move to it was ended because it had granted only a part of the machines, since
    the last round on its machines alone."""
    incomplete_at_s: float = 0.0
    """When the last of these moves was ended."""
    running_s: float = 0.0
    """How long rounds have run on its machines."""
    losses: int = 0
    """How many rounds on its machines have ended with the loss of a machine."""


class UnusableNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """A network whose machines have started, but could train nothing."""

    starts: int = 0
    """Number of consecutive groups."""
    since_s: float = 0.0
    """When the first of them was found to be unusable."""
    last_at_s: float = 0.0
    """When the last of them was."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request for machines that is neither refused nor released."""

    offer: str
    """The name of its offer; '' if the backend chooses."""
    network: str = ""
    """As in `network_of`; '' if the backend chooses."""
    planned_s: float
    """When it was planned."""
    planned_ms: int | None = None
    """The same by the storage's clock; None if that is not known."""
    waiting_since_s: float | None = None
    """Since when the backend gives a reason why machines of it do not run; None if they do."""
    granted_s: float | None = None
    """When the backend gave no reason any more; None if it never gave one."""
    granted_ms: int | None = None
    """The same by the storage's clock; None if that is not known."""
    started_s: Mapping[int, float] = {}
    """Since when each machine, by its index in the group, runs without having been in a round; one
    that its backend restarts keeps its first time."""
    has_trained: bool = False
    """Whether a round has called the training function on its machines."""
    is_unusable: bool = False
    """Whether its machines have started, but could train nothing."""


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The open round."""

    tokens: tuple[Token, ...]
    """The groups of its machines."""
    workers: int = 0
    """Number of its workers."""
    start_progress: float | None
    """The share of the training that was done at its start; None if unknown, as for a snapshot in
    memory."""
    measured_from: tuple[float, float] | None = None
    """Progress, and age of the round in seconds, from which the next commit is measured."""
    committed_age_s: float = 0.0
    """Age of the round at its last commit, or when the training function was called."""
    committed_at_ms: int | None = None
    """When that was, by the storage's clock; None if that is not known."""
    has_committed: bool = False
    """Whether it had a commit: before, the function imports, restores and compiles."""


class MeasuredSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """How long a share of the training has taken."""

    share: float = 0.0
    measured_s: float = 0.0

    @property
    def complete_s(self) -> float:
        """Duration of the complete training at this speed."""
        return self.measured_s / self.share


class MarketRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What was observed in one fit; lifetimes and speed also in earlier ones."""

    choice: MachinesChosen | None = None
    """The last choice; None before the first one."""
    offers: dict[str, OfferRecord] = {}
    """By name; without those that were never refused or used."""
    prices: dict[str, Price | None] = {}
    """Prices that have changed since the start of the fit, by the name of the offer."""
    requests: dict[Token, RequestRecord] = {}
    """Of groups for workers."""
    unusable_networks: dict[str, UnusableNetwork] = {}
    """By `network_of`: those whose last machines could train nothing."""
    round: RoundRecord | None = None
    start_durations_s: tuple[float, ...] = ()
    """The last durations from a request for machines to the call of the training function."""
    commit_gaps_s: tuple[float, ...] = ()
    """The last durations of training between two commits of a round."""
    first_gaps_s: tuple[float, ...] = ()
    """The last durations from the call of the training function to the first commit, which include
    imports and the restore."""
    progress: float | None = None
    """The share of the training that the latest checkpoint contains; None if it is unknown."""
    speeds: dict[int, MeasuredSpeed] = {}
    """The measured speed by number of workers."""
    first_speeds: dict[int, MeasuredSpeed] = {}
    """As `speeds`, in the first interval of each round, which includes its start."""
    startups_s: tuple[float, ...] = ()
    """The last durations from the opening of a round to the call of the training function."""
    deadline_risks: dict[str, str] = {}
    """The reasons of `DeadlineAtRisk`, by kind."""
    training_ended_at_ms: int | None = None
    """When the training of the fit has ended, by the storage's clock; None if that is not known."""

    def record_of(self, offer: str) -> OfferRecord:
        """Return what was observed of the offer with that name."""
        return self.offers.get(offer, OfferRecord())

    def after_fit(self) -> MarketRecord:
        """Return the record with which the next fit of the run starts."""
        return MarketRecord(
            start_durations_s=self.start_durations_s,
            commit_gaps_s=self.commit_gaps_s,
            first_gaps_s=self.first_gaps_s,
            progress=self.progress,
            speeds=self.speeds,
            first_speeds=self.first_speeds,
            startups_s=self.startups_s,
            offers={
                name: OfferRecord(running_s=one.running_s, losses=one.losses)
                for name, one in self.offers.items()
            },
        )


def network_of(offer: Offer) -> str:
    """Return the network of an offer, or its name if that is unknown before a grant."""
    return offer.network or offer.name


def fold_market(
    record: MarketRecord, event: JournalEvent, elapsed_s: float, at_ms: int | None = None
) -> MarketRecord:
    """Return the record after one more entry; `elapsed_s` is that of the entry.

    `at_ms` is when it was written, by the storage's clock; None if its author may not know that.
    """
    match event:
        case MachinesChosen(incomplete_offer=name):
            record = replace(record, choice=event)
            return _count_incomplete_move(record, name, elapsed_s) if name else record
        case MachinesObserved(times=times):
            return _start_machines(record, times, elapsed_s)
        case DeadlineAtRisk(risk=risk, reason=reason):
            return replace(record, deadline_risks={**record.deadline_risks, risk: reason})
        case TrainingEnded() | FitEnded() if record.training_ended_at_ms is None:
            return replace(record, training_ended_at_ms=at_ms)
        case PricesChanged(offers=offers):
            changed = {offer.name: offer.price for offer in offers}
            return replace(record, prices={**record.prices, **changed})
        case GroupPlanned(request=request) if request.role == "train":
            return _plan(record, request, elapsed_s, at_ms)
        case GroupRefused(token=token):
            refused = _refuse(record, token, elapsed_s, event.reason if event.is_final else "")
            return _without_requests(refused, [token])
        case GroupWaiting(token=token, reason=reason) if token in record.requests:
            return _wait(record, token, elapsed_s, at_ms, is_waiting=bool(reason))
        case GroupsReleased(token=token, other_tokens=others):
            for one in (token, *others):
                known = record.requests.get(one)
                if known is not None and known.waiting_since_s is not None:
                    record = _refuse(record, one, elapsed_s, "")
            return _without_requests(record, [token, *others])
        case NodeLost():
            return _lose_node(record, event, elapsed_s)
        case RoundOpened():
            return _open_round(record, event)
        case TrainingFunctionStarted(startup_s=startup_s) if record.round is not None:
            return _start_training(record, record.round, startup_s, elapsed_s, at_ms)
        case CheckpointCommitted():
            return _commit(record, event, at_ms)
        case RoundClosed() if record.round is not None:
            return _close_round(record, record.round, event, elapsed_s)
        case _:
            return record


def with_complete_moves(
    record: MarketRecord, offers: Iterable[str], elapsed_s: float
) -> MarketRecord:
    """Return the record before an entry, for `offers` to which the run could move until then."""
    for name in offers:
        after = replace(record.record_of(name), complete_s=elapsed_s)
        record = _with_offer(record, name, after)
    return record


def _plan(
    record: MarketRecord, request: GroupRequest, elapsed_s: float, at_ms: int | None
) -> MarketRecord:
    offer = request.offer
    planned = RequestRecord(
        offer="" if offer is None else offer.name,
        network="" if offer is None else network_of(offer),
        planned_s=elapsed_s,
        planned_ms=at_ms,
    )
    return replace(record, requests={**record.requests, request.token: planned})


def _count_incomplete_move(record: MarketRecord, offer: str, elapsed_s: float) -> MarketRecord:
    before = record.record_of(offer)
    after = replace(before, incomplete_moves=before.incomplete_moves + 1, incomplete_at_s=elapsed_s)
    return _with_offer(record, offer, after)


def _start_machines(
    record: MarketRecord, times: Mapping[Token, Sequence[MachineTimes]], elapsed_s: float
) -> MarketRecord:
    requests = dict(record.requests)
    for token in times.keys() & requests.keys():
        started = {one.node: elapsed_s for one in times[token] if one.started_ms is not None}
        before = requests[token]
        requests[token] = replace(before, started_s={**started, **before.started_s})
    return replace(record, requests=requests)


def _lose_node(record: MarketRecord, event: NodeLost, elapsed_s: float) -> MarketRecord:
    if event.is_unusable:
        record = _mark_unusable(record, event.token, elapsed_s)
    # A machine that was lost while it booted has trained nothing, like one refused.
    if event.is_unusable or event.is_unused or event.agent is None:
        record = _refuse(record, event.token, elapsed_s, "")
    return record


def _mark_unusable(record: MarketRecord, token: Token, elapsed_s: float) -> MarketRecord:
    """Count the group of that machine once: usually all of its machines are unusable."""
    request = record.requests.get(token)
    if request is None or request.is_unusable or not request.network:
        return record
    before = record.unusable_networks.get(request.network, UnusableNetwork(since_s=elapsed_s))
    after = replace(before, starts=before.starts + 1, last_at_s=elapsed_s)
    return replace(
        record,
        requests={**record.requests, token: replace(request, is_unusable=True)},
        unusable_networks={**record.unusable_networks, request.network: after},
    )


def _refuse(record: MarketRecord, token: Token, elapsed_s: float, reason: str) -> MarketRecord:
    request = record.requests.get(token)
    if request is None or not request.offer:
        return record
    before = record.record_of(request.offer)
    since = (before.refused_since_s, request.waiting_since_s, elapsed_s)
    since_s = next(one for one in since if one is not None)
    after = replace(
        before,
        refusals=before.refusals + 1,
        refused_since_s=since_s,
        refused_at_s=elapsed_s,
        final_refusal=reason,
    )
    return _with_offer(record, request.offer, after)


def _wait(
    record: MarketRecord, token: Token, elapsed_s: float, at_ms: int | None, *, is_waiting: bool
) -> MarketRecord:
    request = record.requests[token]
    if is_waiting == (request.waiting_since_s is not None):
        return record
    if is_waiting:
        changed = replace(request, waiting_since_s=elapsed_s)
    else:
        changed = replace(request, waiting_since_s=None, granted_s=elapsed_s, granted_ms=at_ms)
    return replace(record, requests={**record.requests, token: changed})


def _with_offer(record: MarketRecord, offer: str, after: OfferRecord) -> MarketRecord:
    return replace(record, offers={**record.offers, offer: after})


def _without_requests(record: MarketRecord, tokens: Sequence[Token]) -> MarketRecord:
    kept = {token: one for token, one in record.requests.items() if token not in tokens}
    return replace(record, requests=kept)


def _open_round(record: MarketRecord, event: RoundOpened) -> MarketRecord:
    tokens = tuple(dict.fromkeys(one.token for one in event.round.assignments))
    offers = _offers_of(record, tokens)
    for offer in offers:
        before = record.record_of(offer)
        granted = replace(
            before,
            refusals=0,
            refused_since_s=None,
            final_refusal="",
            # A round beside machines of other offers does not need all machines of this one.
            incomplete_moves=before.incomplete_moves if offers[1:] else 0,
        )
        record = _with_offer(record, offer, granted)
    used = {record.requests[one].network for one in tokens if one in record.requests}
    unusable = {name: one for name, one in record.unusable_networks.items() if name not in used}
    start_progress = record.progress if event.round.checkpoint_name is not None else 0.0
    if event.round.memory_snapshot is not None:
        start_progress = None
    opened = RoundRecord(
        tokens=tokens, workers=event.round.world_size, start_progress=start_progress
    )
    return replace(record, round=opened, unusable_networks=unusable)


def _offers_of(record: MarketRecord, tokens: Sequence[Token]) -> list[str]:
    offers = (record.requests[token].offer for token in tokens if token in record.requests)
    return list(dict.fromkeys(filter(None, offers)))


def _start_training(
    record: MarketRecord,
    opened: RoundRecord,
    startup_s: float,
    elapsed_s: float,
    at_ms: int | None,
) -> MarketRecord:
    durations_s = record.start_durations_s
    started_s = _start_duration_s(record, opened, startup_s, elapsed_s, at_ms)
    if started_s is not None:
        durations_s = (*durations_s, started_s)[-MAX_MEASUREMENTS:]
    trained = {
        token: replace(one, has_trained=one.has_trained or token in opened.tokens)
        for token, one in record.requests.items()
    }
    start = opened.start_progress
    round_ = replace(
        opened,
        measured_from=None if start is None else (start, startup_s),
        committed_age_s=startup_s,
        committed_at_ms=at_ms,
    )
    return replace(
        record,
        requests=trained,
        start_durations_s=durations_s,
        startups_s=(*record.startups_s, startup_s)[-MAX_MEASUREMENTS:],
        round=round_,
    )


def _start_duration_s(
    record: MarketRecord,
    opened: RoundRecord,
    startup_s: float,
    elapsed_s: float,
    at_ms: int | None,
) -> float | None:
    """The time from a request for machines, or from their grant if they had to wait for capacity,
    to the call of the training function; None if the round has no new machines."""
    requests = (record.requests[token] for token in opened.tokens if token in record.requests)
    new = [one for one in requests if not one.has_trained]
    # The first machines of a group of which others still wait were granted at an unknown time.
    if not new or any(one.waiting_since_s is not None for one in new):
        return None
    # The latest request: machines that joined before have waited for those of it.
    granted_s = max(one.planned_s if one.granted_s is None else one.granted_s for one in new)
    started_s = max(elapsed_s - granted_s, startup_s)
    granted_ms = [one.planned_ms if one.granted_s is None else one.granted_ms for one in new]
    known_ms = [one for one in granted_ms if one is not None]
    if at_ms is not None and known_ms:
        # `elapsed_s` lacks the time from the last entry of the leader that requested them until
        # the new one has read it: at the first start, most of the boot.
        started_s = max(started_s, (at_ms - max(known_ms)) / 1000)
    return started_s


def _commit(record: MarketRecord, event: CheckpointCommitted, at_ms: int | None) -> MarketRecord:
    record = replace(record, progress=event.progress)
    opened, age_s = record.round, event.round_age_s
    if opened is None or age_s is None:
        return record
    gap_s = max(0.0, age_s - opened.committed_age_s)
    measured_from = None if event.progress is None else (event.progress, age_s)
    record = replace(
        record,
        round=replace(
            opened,
            measured_from=measured_from,
            committed_age_s=age_s,
            committed_at_ms=at_ms,
            has_committed=True,
        ),
    )
    if opened.has_committed:
        gaps_s = (*record.commit_gaps_s, gap_s)[-MAX_MEASUREMENTS:]
        record = replace(record, commit_gaps_s=gaps_s)
    else:
        gaps_s = (*record.first_gaps_s, gap_s)[-MAX_MEASUREMENTS:]
        record = replace(record, first_gaps_s=gaps_s)
    if opened.measured_from is None or event.progress is None:
        return record
    share, measured_s = event.progress - opened.measured_from[0], age_s - opened.measured_from[1]
    if share <= 0 or measured_s <= 0:
        return record
    if opened.has_committed:
        return replace(
            record, speeds=_with_measurement(record.speeds, opened.workers, share, measured_s)
        )
    first = _with_measurement(record.first_speeds, opened.workers, share, measured_s)
    return replace(record, first_speeds=first)


def _with_measurement(
    speeds: dict[int, MeasuredSpeed], workers: int, share: float, measured_s: float
) -> dict[int, MeasuredSpeed]:
    before = speeds.get(workers, MeasuredSpeed())
    after = MeasuredSpeed(share=before.share + share, measured_s=before.measured_s + measured_s)
    return {**speeds, workers: after}


def _close_round(
    record: MarketRecord, opened: RoundRecord, event: RoundClosed, elapsed_s: float
) -> MarketRecord:
    duration_s = opened.committed_age_s if event.duration_s is None else event.duration_s
    is_loss = event.cause in (FailureCause.PREEMPTION, FailureCause.PLATFORM)
    for offer in _offers_of(record, opened.tokens):
        before = record.record_of(offer)
        used = replace(
            before, running_s=before.running_s + duration_s, losses=before.losses + is_loss
        )
        record = _with_offer(record, offer, used)
    requests = {
        token: replace(one, started_s=dict.fromkeys(one.started_s, elapsed_s))
        if token in opened.tokens
        else one
        for token, one in record.requests.items()
    }
    return replace(record, round=None, requests=requests)
