"""Who checks the checker? Designs known to be wrong must be caught, and the sound one passes."""

from collections.abc import Sequence
from typing import Any

import pytest

import spotfit.agent.agent
import spotfit.agent.legacy
import spotfit.ledger.journal
from spotfit.agent.collectives import Answer
from spotfit.agent.copies import Shelf
from spotfit.agent.hub import Hub
from spotfit.agent.tidying import Tidying
from spotfit.agent.validation import Validation
from spotfit.control.conductor import Conductor
from spotfit.control.errands import Done
from spotfit.control.scribe import Scribe
from spotfit.core.ids import Token
from spotfit.ledger.journal import Pages
from spotfit.model.events import (
    Blame,
    CheckpointCommitted,
    Entry,
    Event,
    Noticed,
    RoundClosed,
)
from spotfit.model.fold import fold
from spotfit.model.group import GroupRequest
from spotfit.model.holding import State
from spotfit.model.view import View
from spotfit.model.watch import Watch
from spotfit.model.wire import Saved
from spotfit.model.world import Round
from spotfit.policy import failure, recovery, retention, validation
from spotfit.policy.actions import Order, Write
from spotfit_localsim.bucket import ChecksThenWrites, IgnoresCreate
from spotfit_localsim.cloud import Forgetful
from spotfit_localsim.crew import SimCrew
from spotfit_localsim.invariants import InvariantBroken
from spotfit_localsim.library import (
    cloud_that_forgets_to_answer,
    copies_come_late,
    deposed_leader,
    flapping_network,
    goes_back,
    one_name_for_all,
    plain,
    preemption_with_notice,
    random_storm,
    slow_bucket,
    spot_storm,
    validated_after_the_training,
    validated_in_a_storm,
)
from spotfit_localsim.run import SOUND, Design, simulate
from spotfit_localsim.scenario import Scenario

ENOUGH = 60
"""Seeds within which a wrong design must be caught."""

World = tuple[Scenario, int]


def storms(seeds: range = range(ENOUGH)) -> list[World]:
    return [(random_storm(seed), seed) for seed in seeds]


def seeds_of(*scenarios: Scenario) -> list[World]:
    return [(scenario, seed) for seed in range(ENOUGH) for scenario in scenarios]


def caught(worlds: Sequence[World], design: Design = SOUND) -> tuple[World, str]:
    """The first of these worlds in which something did not hold, and what."""
    for scenario, seed in worlds:
        try:
            simulate(scenario, seed, design)
        except InvariantBroken as broken:
            return (scenario, seed), str(broken).partition("\n")[0]
    pytest.fail(f"not caught in {len(worlds)} worlds")


def sound_in(world: World) -> None:
    """The production design survives the very world that caught the wrong one."""
    assert simulate(*world).broken is None


@pytest.mark.parametrize(
    ("design", "worlds"),
    [
        (Design(store=ChecksThenWrites), seeds_of(slow_bucket, deposed_leader)),
        (Design(store=IgnoresCreate), seeds_of(slow_bucket, deposed_leader)),
        (Design(provisioner=Forgetful), seeds_of(cloud_that_forgets_to_answer)),
    ],
    ids=["create looks, then writes", "the bucket ignores create", "a fresh token each try"],
)
def test_caught_is_a_part_that_breaks_its_promise(design: Design, worlds: list[World]) -> None:
    world, _ = caught(worlds, design)
    sound_in(world)


class AppendsAtTheHead(Scribe):
    """Appends to what the journal is now, not to what the decision was made from."""

    def write(self, event: Event, now: float) -> None:
        self.ledger.catch_up()
        super().write(event, now)


class TrustsItself(Scribe):
    """Takes its own entry for written, whatever the store says."""

    def _answered(self, offer: Any, done: Done, now: float) -> None:
        super()._answered(offer, Done(), now)


class ThinksAgain(Scribe):
    """After a call that failed it reads, and takes what is not there for never sent."""

    def _answered(self, offer: Any, done: Done, now: float) -> None:
        super()._answered(offer, done, now)
        self._asked = True

    def _take(self, pages: Pages, now: float) -> None:
        super()._take(pages, now)
        self._offer = None


class DecidesMeanwhile(Scribe):
    """Does not wait until it is known what became of an entry."""

    def go_on(self, now: float) -> None:
        self._offer = None
        super().go_on(now)


@pytest.mark.parametrize("scribe", [AppendsAtTheHead, TrustsItself, ThinksAgain, DecidesMeanwhile])
def test_caught_is_a_scribe_that(scribe: type[Scribe], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(spotfit.agent.agent, "Scribe", scribe)
        world, _ = caught([*seeds_of(deposed_leader, slow_bucket), *storms()])
    sound_in(world)


def test_caught_is_an_effect_before_its_intent(monkeypatch: pytest.MonkeyPatch) -> None:
    def buys_first(self: Conductor, order: Order, now: float) -> None:
        spec = self._scribe.view.spec
        assert spec is not None
        token = Token(self._new_token())
        plan = self._provisioner.plan(GroupRequest(token, order.workers, spec.workers_max))
        self._provisioner.submit(plan, self._launch)
        intend(self, order, now)

    intend = Conductor._intend
    with monkeypatch.context() as patch:
        patch.setattr(Conductor, "_intend", buys_first)
        world, why = caught(seeds_of(plain))
    assert "knows nothing" in why
    sound_in(world)


def test_caught_is_a_hub_that_commits_before_all_ranks_have_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hasty(self: Hub, rank: int, n: int, saved: Saved) -> list[Answer]:
        if n in self._saving:
            self._saving[n].done.update(self._saving[n].ranks)
        return save(self, rank, n, saved)

    save = Hub._save
    with monkeypatch.context() as patch:
        patch.setattr(Hub, "_save", hasty)
        world, why = caught(seeds_of(plain))
    assert "has no files of rank" in why
    sound_in(world)


def test_caught_is_a_hub_that_gives_a_name_as_often_as_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Hub, "_use", lambda _, chosen, __: (chosen, ""))
        world, why = caught(seeds_of(one_name_for_all))
    assert "of the committed checkpoint last" in why or "no complete set" in why
    sound_in(world)


def test_caught_is_an_agent_that_does_not_wait_for_the_last_workers_to_be_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(SimCrew, "busy", property(lambda _: False))
        world, why = caught(seeds_of(spot_storm))
    assert "beside others of its own" in why
    sound_in(world)


def test_caught_is_a_fold_that_forgets_something(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(view: View, entry: Entry) -> View:
        return fold(view, entry) if not isinstance(entry.event, Noticed) else after(view)

    def after(view: View) -> View:
        return View(next_slot=view.next_slot + 1, run_id=view.run_id, spec=view.spec)

    with monkeypatch.context() as patch:
        patch.setattr(spotfit.ledger.journal, "fold", forgetful)
        world, why = caught(seeds_of(preemption_with_notice))
    assert "another run than the journal tells" in why
    sound_in(world)


def test_caught_is_a_leader_that_does_not_heed_its_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    led: set[str] = set()

    def leads(self: View, agent: str) -> bool:
        if self.epoch == 0:
            led.clear()  # another world has begun
        if self.leader is not None and self.leader.leader == agent:
            led.add(agent)
        return agent in led

    with monkeypatch.context() as patch:
        patch.setattr(View, "leads", leads)
        world, why = caught(seeds_of(deposed_leader, flapping_network))
    assert "decided" in why
    sound_in(world)


def test_caught_is_a_judge_who_takes_echoes_for_the_users_mistakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closing(view: View, watch: Watch, round_: Round) -> RoundClosed:
        if watch.failures:
            return RoundClosed(round_.number, Blame.WORKER, "somebody raised")
        return judged(view, watch, round_)

    judged = failure.closing
    with monkeypatch.context() as patch:
        patch.setattr(failure, "closing", closing)
        world, why = caught(seeds_of(spot_storm, flapping_network))
    assert "the user is blamed" in why
    sound_in(world)


def test_caught_is_a_retention_that_does_not_wait_for_validations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hasty(checkpoints: Any, keep: Any, *, protected: Any = ()) -> Any:
        return expendable(checkpoints, keep)

    expendable = retention.expendable
    with monkeypatch.context() as patch:
        patch.setattr(retention, "expendable", hasty)
        world, why = caught(seeds_of(validated_in_a_storm))
    assert "still to be validated" in why
    sound_in(world)


def test_caught_is_a_leader_that_begins_what_another_validates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(validation, "_lost", lambda _view, watch: watch.turned_at == watch.led_since)
        world, why = caught(seeds_of(validated_in_a_storm))
    assert "already" in why
    sound_in(world)


def test_caught_is_an_agent_that_tells_a_verdict_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(self: Validation, *, anew: bool) -> None:
        tell(self, anew=False)

    tell = Validation.tell
    with monkeypatch.context() as patch:
        patch.setattr(Validation, "tell", once)
        world, why = caught(storms(range(200)))
    assert "did not end" in why
    sound_in(world)


def test_caught_is_a_run_that_ends_before_its_validations(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(validation, "ending", lambda _view, ended: Write(ended))
        world, why = caught(seeds_of(validated_after_the_training))
    assert "are still to be validated" in why
    sound_in(world)


def test_caught_is_a_leader_that_adopts_what_an_abandoned_round_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(spotfit.agent.legacy, "_is_news", lambda _view, _found: True)
        patch.setattr(Tidying, "search", lambda *_, **__: None)  # what is deleted tempts nobody
        world, _ = caught(storms())  # it takes a rare coincidence all the same
    sound_in(world)


def test_caught_is_who_goes_on_from_memory_though_more_is_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_rounds_alone(committed: CheckpointCommitted, state: State) -> bool:
        return committed.round > state.round

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "_is_newer", by_rounds_alone)
        world, why = caught(seeds_of(copies_come_late))
    assert "in memory, and step" in why
    sound_in(world)


def test_caught_is_who_keeps_what_the_training_went_back_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Shelf, "take_back", lambda *_: None)
        world, why = caught(seeds_of(goes_back))
    assert "which was taken back" in why
    sound_in(world)
