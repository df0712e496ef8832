"""Whether an elastic round ends before its next commit, because machines wait for that. Pure.

A round that could have more workers usually ends directly after a commit: no step is repeated then.
Until that commit the further machines are paid for without any use. The round ends at once if the
next commit is so far away that the work which is repeated costs less:

    2 · (age + pause) · n < idle · wait

    age    training since the last commit, which the next round repeats
    pause  of one more restart, if machines start that could join at the next commit
    n      workers of the round
    idle   workers that the next round has in addition
    wait   expected time to the next commit

With a deadline this is also the choice that is expected to spend less slack, as both sides are
counted in workers (docs/decisions/0063).
"""

from __future__ import annotations

from spotfit.core.units import format_count, format_seconds
from spotfit.model.leader_state import Training
from spotfit.model.view import View
from spotfit.policy.training_time import restart_s

# The interval between two commits is an estimate, and further machines may join: repeating work
# must be worth more than the estimate may be wrong by.
_MARGIN = 2.0

MAX_REPEATED_SHARE = 0.2
"""The slack that a growth may spend on repeated work, as a share of the interval between commits.

With x = n / (n + idle) and the interval G, the rule repeats x·age < G·x·(1 - x) / (1 + x), which is
0.18·G at most.
"""

# Until the run has measured the interval between two commits. Checkpoints that user code writes are
# minutes to hours apart. Also the most that a round repeats: a training that saves hardly ever
# would be repeated at each growth.
_UNKNOWN_INTERVAL_S = 600.0


def reason_to_repeat(
    view: View, training: Training, now: float, *, slots: int, is_start_expected: bool
) -> str:
    """Return why the open round should end now, without a commit; '' if it should not.

    `slots` are those that the next round would have, `is_start_expected` whether further machines
    start that could join it. `now` is the leader's `Clock.now()` in seconds.
    """
    opened, workers = view.market.round, training.round.world_size
    # A checkpoint that is being uploaded is usually committed within seconds.
    if opened is None or view.round_startup_s is None or training.uploading_ranks:
        return ""
    age_s = max(0.0, now - training.since - opened.committed_age_s)
    pause_s = restart_s(view) + view.spec.timing.round_fill_timeout_s if is_start_expected else 0.0
    wait_s, idle = _time_to_commit_s(view, training, now, age_s=age_s), slots - workers
    is_worth_it = _MARGIN * (age_s + pause_s) * workers < idle * wait_s
    if not is_worth_it or age_s > _UNKNOWN_INTERVAL_S:
        return ""
    repeated = f"{format_seconds(age_s)} of {format_count(workers, 'worker')}"
    waiting = f"{format_count(idle, 'more worker')} would wait for {format_seconds(wait_s)}"
    return f"repeating {repeated}, as {waiting}"


def _time_to_commit_s(view: View, training: Training, now: float, *, age_s: float) -> float:
    """The expected time to the next commit.

    A commit that is overdue, or that the workers were asked for, is expected to take as long again.
    """
    if training.save_suggested_at is not None:
        return now - training.save_suggested_at
    record, opened = view.market, view.market.round
    has_committed = opened is not None and opened.has_committed
    measured = record.commit_gaps_s if has_committed else record.first_gaps_s
    # The shortest of them: a smaller group may have made the others.
    gaps_s = measured or record.commit_gaps_s or record.first_gaps_s
    return abs(min(gaps_s, default=_UNKNOWN_INTERVAL_S) - age_s)
