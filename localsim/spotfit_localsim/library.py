"""The storms worth keeping, and a storm from a seed."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from spotfit.model.spec import Keep, Limits, Tempo, Vigil
from spotfit_localsim.dice import Dice, Stream
from spotfit_localsim.faults import Faults
from spotfit_localsim.market import Market
from spotfit_localsim.scenario import (
    Act,
    At,
    Cancel,
    Crash,
    Freeze,
    Isolate,
    Laptop,
    Outage,
    Reclaim,
    Scenario,
    Stall,
    Step,
    Whom,
    Wire,
)
from spotfit_localsim.traces import Trace
from spotfit_localsim.workload import Crash as Mistake
from spotfit_localsim.workload import Validations, Workload

SHAKY = Faults(unsent=0.01, lost_answers=0.01, slow=0.02, freezes=0.002, freeze_s=(0.2, 30.0))
"""A bucket and machines of an ordinary bad day."""

LONG = Workload(steps=60, save_every=6)

plain = Scenario("plain")

spot_storm = Scenario(
    "spot_storm",
    load=LONG,
    market=Market(reclaims_per_hour=60.0, with_notice=0.5, boot_s=(3.0, 15.0)),
    faults=replace(SHAKY, deaths=0.0003),
)

zone_outage = Scenario(
    "zone_outage",
    load=LONG,
    market=Market(capacity=Trace("outage", ((0.0, 4), (25.0, 0), (120.0, 4)))),
)

slow_bucket = Scenario(
    "slow_bucket",
    faults=Faults(unsent=0.05, lost_answers=0.05, slow=0.3, slow_s=(0.5, 12.0)),
    acts=(Reclaim(Step(12), "leader"),),
)

lone_survivor = Scenario(
    "lone_survivor",
    workers=6,
    workers_min=1,
    slots=1,
    load=LONG,
    market=Market(capacity=Trace("one is left", ((0.0, 6), (30.0, 1), (100.0, 6)))),
)

deposed_leader = Scenario(
    "deposed_leader",
    load=LONG,
    faults=replace(SHAKY, freezes=0.0),
    acts=(Freeze(Step(10), 60.0, "leader"), Freeze(Step(30), 40.0, "leader")),
)

everybody_reclaimed = Scenario(
    "everybody_reclaimed",
    load=LONG,
    acts=(Reclaim(Step(20), "everybody"), Reclaim(Step(45), "everybody")),
)

everybody_reclaimed_unseen = replace(
    everybody_reclaimed,
    name="everybody_reclaimed_unseen",
    laptop=Laptop(dies_at_s=15.0),
)

flapping_network = Scenario(
    "flapping_network",
    load=LONG,
    wire=Wire(latency_s=(0.001, 0.01), resets_per_hour=200.0, walls_per_hour=120.0),
    faults=SHAKY,
)

one_way_silence = Scenario(
    "one_way_silence",
    load=LONG,
    acts=(
        Isolate(Step(8), 40.0, "leader", outwards=True, inwards=False),
        Isolate(Step(30), 40.0, "follower", outwards=False, inwards=True),
    ),
)

bucket_outage = Scenario(
    "bucket_outage",
    load=LONG,
    laptop=Laptop(sweep_every_s=50.0, swept_anyway=True),
    acts=(Outage(Step(10), 15.0), Outage(Step(30), 50.0), Reclaim(Step(32), "follower")),
)

bucket_stalls = Scenario(
    "bucket_stalls",
    load=LONG,
    faults=Faults(stalls=0.01),
    acts=(Stall(Step(10), 30.0), Stall(Step(30), 8.0), Reclaim(Step(32), "follower")),
)

laptop_dies = Scenario(
    "laptop_dies",
    load=LONG,
    laptop=Laptop(dies_at_s=0.7),
    acts=(Reclaim(Step(10), "follower"), Reclaim(Step(20), "leader")),
)

elastic_shrink_grow = Scenario(
    "elastic_shrink_grow",
    workers=8,
    workers_min=2,
    load=Workload(steps=120, save_every=6),
    tempo=Tempo(form_patience_s=10.0),
    market=Market(capacity=Trace("waves", ((0.0, 4), (40.0, 2), (70.0, 4), (90.0, 1), (110.0, 4)))),
)

worker_crashes_within_budget = Scenario(
    "worker_crashes_within_budget",
    limits=Limits(worker=3),
    load=Workload(
        crashes=(Mistake(10, rank=1), Mistake(13, rank=0, how="dies"), Mistake(30, rank=3))
    ),
)

a_rank_hangs = Scenario(
    "a_rank_hangs",
    limits=Limits(worker=2),
    load=Workload(crashes=(Mistake(10, rank=1, how="hangs"), Mistake(25, rank=3, how="hangs"))),
    vigil=Vigil(silent_s=20.0),
)

budget_exhausted = Scenario(
    "budget_exhausted",
    limits=Limits(worker=1),
    load=Workload(crashes=(Mistake(10, rank=1, times=5),)),
    outcome="failed",
)

preemption_budget_exhausted = Scenario(
    "preemption_budget_exhausted",
    limits=Limits(preemption=0),
    acts=(Reclaim(Step(10), "follower"),),
    outcome="failed",
)

cancel_midway = Scenario(
    "cancel_midway",
    faults=SHAKY,
    acts=(Cancel(Step(15)),),
    outcome="cancelled",
)

preemption_with_notice = Scenario(
    "preemption_with_notice",
    load=LONG,
    acts=(Reclaim(Step(10), "follower", notice=True), Reclaim(Step(40), "leader", notice=True)),
)

machines_that_never_speak = Scenario(
    "machines_that_never_speak",
    tempo=Tempo(boot_patience_s=60.0),
    market=Market(dead_boots=0.5),
    storm_s=200.0,
)

cloud_that_forgets_to_answer = Scenario(
    "cloud_that_forgets_to_answer",
    load=LONG,
    market=Market(lost_answers=0.3, refusals=0.3, refuses=True, reclaims_per_hour=40.0),
    faults=replace(SHAKY, deaths=0.0005),
)

few_are_kept = Scenario(
    "few_are_kept",
    load=Workload(steps=80, save_every=3),
    keep=Keep(last=2, score="step", order="min"),
    faults=SHAKY,
    acts=(Crash(Step(25), "leader"), Crash(Step(50), "follower")),
)

same_names_again = Scenario(
    "same_names_again",
    load=replace(LONG, names="by step", save_s=(0.5, 4.0)),
    acts=(Reclaim(Step(14), "follower"), Reclaim(Step(25), "leader"), Crash(Step(37), "anybody")),
)

one_name_for_all = Scenario(
    "one_name_for_all",
    load=replace(LONG, names="one", save_s=(0.5, 4.0), background=True),
    faults=SHAKY,
    acts=same_names_again.acts,
)

uploads_outlive_workers = Scenario(
    "uploads_outlive_workers",
    load=Workload(
        steps=40,
        save_every=10,
        save_s=(3.0, 4.0),
        background=True,
        crashes=tuple(Mistake(step, how="dies") for step in (11, 22, 33)),
    ),
    limits=Limits(worker=3),
)

copies_come_late = Scenario(
    "copies_come_late",
    load=Workload(
        steps=60,
        save_every=2,
        save_s=(0.05, 0.2),
        snapshots=True,
        copy_s=(0.1, 0.7),
    ),
    acts=tuple(Reclaim(Step(step), "follower") for step in (15, 31, 47)),
)
"""Commits overtake copies: what a lost machine leaves with its neighbour is older."""

goes_back = Scenario(
    "goes_back",
    load=Workload(
        steps=60,
        save_every=2,
        save_s=(0.5, 2.0),
        snapshots=True,
        copy_s=(0.01, 0.1),
        goes_back=0.3,
        crashes=tuple(Mistake(step, how="dies") for step in (11, 23, 35, 47)),
    ),
    limits=Limits(worker=4),
)
"""Machines have copies of each other's states, which are left behind, and workers die."""

dead_machines_that_tell_nobody = Scenario(
    "dead_machines_that_tell_nobody",
    load=LONG,
    market=Market(told_deaths=0.0, reclaims_per_hour=40.0, with_notice=0.0),
)

validated_in_a_storm = Scenario(
    "validated_in_a_storm",
    load=replace(LONG, validations=Validations()),
    keep=Keep(last=1, score="score"),
    tempo=Tempo(validator_patience_s=30.0, validator_idle_s=20.0),
    market=Market(reclaims_per_hour=60.0, with_notice=0.5, boot_s=(3.0, 15.0), refusals=0.2),
    faults=replace(SHAKY, deaths=0.0003),
)

validated_after_the_training = Scenario(
    "validated_after_the_training",
    load=replace(LONG, validations=Validations(takes_s=(30.0, 60.0), timeout_s=45.0)),
    laptop=Laptop(dies_at_s=20.0),
    tempo=Tempo(validator_idle_s=20.0),
    market=Market(reclaims_per_hour=40.0),
    storm_s=600.0,
)

LIBRARY: tuple[Scenario, ...] = (
    plain,
    spot_storm,
    zone_outage,
    slow_bucket,
    lone_survivor,
    deposed_leader,
    everybody_reclaimed,
    everybody_reclaimed_unseen,
    flapping_network,
    one_way_silence,
    bucket_outage,
    bucket_stalls,
    laptop_dies,
    elastic_shrink_grow,
    worker_crashes_within_budget,
    budget_exhausted,
    preemption_budget_exhausted,
    cancel_midway,
    preemption_with_notice,
    machines_that_never_speak,
    cloud_that_forgets_to_answer,
    few_are_kept,
    same_names_again,
    one_name_for_all,
    uploads_outlive_workers,
    copies_come_late,
    goes_back,
    a_rank_hangs,
    dead_machines_that_tell_nobody,
    validated_in_a_storm,
    validated_after_the_training,
)


def random_storm(seed: int) -> Scenario:
    """A world like no other: every dial is turned by the seed, within what a run must survive."""
    dice = Dice(seed).stream("storm")
    slots = dice.choice([1, 1, 2, 2, 4])
    workers = slots * dice.choice([1, 2, 2, 3, 4])
    elastic = dice.chance(0.4)
    mistakes = _mistakes(dice, workers) if dice.chance(0.3) and not elastic else ()
    market = _market(dice)
    storm = Scenario(
        f"storm {seed}",
        workers=workers,
        workers_min=dice.randint(1, workers) if elastic else None,
        slots=slots,
        load=_chosen(replace(_load(dice, mistakes), background=_in_background(seed)), seed),
        market=market,
        faults=_faults(dice),
        wire=_wire(dice),
        limits=Limits(worker=len(mistakes)),
        keep=Keep(last=dice.choice([None, 1, 2]), score=dice.choice([None, "step"])),
        tempo=Tempo(form_patience_s=dice.choice([5.0, 60.0]), boot_patience_s=120.0),
        laptop=_laptop(dice, market),
        acts=tuple(_act(dice) for _ in range(dice.choice([0, 0, 1, 2, 3]))),
        skew=dice.choice([0.0, 0.0005, 0.02]),
        storm_s=dice.uniform(60.0, 300.0),
    )
    storm = _with_stalls(storm, Dice(seed).stream("stalls"))
    # Half of them validate; the others stay as they were when their seeds were found.
    return _validated(storm, Dice(seed).stream("validations")) if seed % 4 in (0, 3) else storm


def random_saves(seed: int) -> Scenario:
    """The same world, where all ranks save as a Checkpointer does, and often."""
    storm = random_storm(seed)
    dice = Dice(seed).stream("saves")
    load = replace(
        storm.load,
        snapshots=True,
        validations=None,
        names="made",
        save_every=dice.choice([1, 2, 4]),
        stall_s=(0.001, dice.choice([0.01, 0.5])),
        copy_s=(0.01, dice.choice([0.1, 1.0, 10.0])),
        goes_back=Dice(seed).stream("back").choice([0.0, 0.0, 0.0, 0.1]),
    )
    keep = structs.replace(storm.keep, score=dice.choice([None, "step"]))
    return replace(storm, name=f"saves {seed}", load=load, keep=keep)


def _with_stalls(storm: Scenario, dice: Stream) -> Scenario:
    """A third of all worlds have a bucket that hangs now and then, half of these all at once."""
    if not dice.chance(0.35):
        return storm
    faults = replace(storm.faults, stalls=dice.choice([0.0, 0.002, 0.01, 0.05]))
    when = At(dice.uniform(1.0, 200.0)) if dice.chance(0.5) else Step(dice.randint(1, 40))
    stall = (Stall(when, dice.uniform(3.0, 60.0)),) if dice.chance(0.5) else ()
    return replace(storm, faults=faults, acts=(*storm.acts, *stall))


def _validated(storm: Scenario, dice: Stream) -> Scenario:
    keep = storm.keep
    if keep.score is not None and dice.chance(0.5):
        keep = structs.replace(keep, score="score")
    tempo = structs.replace(
        storm.tempo,
        validator_patience_s=dice.choice([10.0, 60.0]),
        validator_idle_s=dice.choice([1.0, 20.0]),
    )
    load = replace(storm.load, validations=_validations(dice))
    longest_s = storm.load.steps * load.validations.timeout_s if load.validations else 0.0
    patience_s = storm.patience_s + longest_s
    return replace(storm, load=load, keep=keep, tempo=tempo, patience_s=patience_s)


def _chosen(load: Workload, seed: int) -> Workload:
    """In a fifth of all worlds one name is used for all checkpoints; from dice of its own, too."""
    return replace(load, names="one") if Dice(seed).stream("one name").chance(0.2) else load


def _in_background(seed: int) -> bool:
    """From dice of its own: what a seed told before there was this choice, it still tells."""
    return Dice(seed).stream("left to the agent").chance(0.4)


def _laptop(dice: Stream, market: Market) -> Laptop:
    dies_at_s = dice.uniform(0.5, 200.0) if dice.chance(0.5) else None
    # Who is to give up a machine that never speaks must watch it for longer than a boot may take.
    sweep_s = 180.0 if market.dead_boots else 45.0
    return Laptop(dies_at_s, sweep_s + 45.0, sweep_s, swept_anyway=dice.chance(0.2))


def _load(dice: Stream, mistakes: tuple[Mistake, ...]) -> Workload:
    return Workload(
        steps=dice.randint(10, 60),
        step_s=(0.1, dice.uniform(0.2, 1.5)),
        start_s=(0.05, dice.uniform(0.1, 3.0)),
        report_every=dice.choice([0, 1, 3]),
        save_every=dice.choice([0, 1, 4, 10]),
        save_s=(0.05, dice.uniform(0.1, 5.0)),
        everyone_saves=dice.chance(0.6),
        saves_on_notice=dice.chance(0.7),
        names="by step" if dice.chance(0.3) else "made",
        barriers=dice.chance(0.3),
        peers_raise=dice.choice([0.0, 0.5, 1.0]),
        end_s=(0.005, dice.choice([0.05, 3.0])),
        crashes=mistakes,
    )


def _validations(dice: Stream) -> Validations:
    return Validations(
        share=dice.choice([0.3, 1.0]),
        takes_s=(0.1, dice.choice([1.0, 10.0, 25.0])),
        failing=dice.choice([0.0, 0.2]),
        hanging=dice.choice([0.0, 0.1]),
        timeout_s=dice.choice([10.0, 30.0]),
        own_machine=dice.choice([None, None, True, False]),
    )


def _mistakes(dice: Stream, workers: int) -> tuple[Mistake, ...]:
    steps = dice.sample(range(1, 10), dice.randint(1, 3))
    return tuple(
        Mistake(step, rank=dice.randrange(workers), how=dice.choice(["raises", "dies"]))
        for step in steps
    )


def _market(dice: Stream) -> Market:
    return Market(
        reclaims_per_hour=dice.choice([0.0, 20.0, 60.0, 150.0]),
        with_notice=dice.random(),
        notice_s=dice.choice([5.0, 30.0, 120.0]),
        boot_s=(1.0, dice.uniform(2.0, 30.0)),
        dead_boots=dice.choice([0.0, 0.0, 0.1]),
        refuses=dice.chance(0.5),
        refusals=dice.choice([0.0, 0.0, 0.3]),
        told_deaths=dice.random(),
        lost_answers=dice.choice([0.0, 0.0, 0.1]),
        capacity=_capacity(dice) if dice.chance(0.3) else None,
    )


def _capacity(dice: Stream) -> Trace:
    moments = [0.0, *sorted(dice.uniform(10.0, 200.0) for _ in range(dice.randint(1, 5)))]
    return Trace("drawn", tuple((moment, dice.randint(0, 5)) for moment in moments))


def _faults(dice: Stream) -> Faults:
    if dice.chance(0.2):
        return Faults()
    return Faults(
        unsent=dice.choice([0.0, 0.01, 0.05]),
        lost_answers=dice.choice([0.0, 0.01, 0.05]),
        slow=dice.choice([0.0, 0.02, 0.1]),
        freezes=dice.choice([0.0, 0.001, 0.01]),
        freeze_s=(0.2, dice.choice([3.0, 40.0])),
        deaths=dice.choice([0.0, 0.0002, 0.001]),
    )


def _wire(dice: Stream) -> Wire:
    return Wire(
        latency_s=(0.0005, dice.choice([0.003, 0.02, 0.2])),
        resets_per_hour=dice.choice([0.0, 0.0, 60.0, 300.0]),
        walls_per_hour=dice.choice([0.0, 0.0, 30.0, 150.0]),
    )


_WAYS = ((True, True), (True, False), (False, True))


def _act(dice: Stream) -> Act:
    when = At(dice.uniform(1.0, 200.0)) if dice.chance(0.3) else Step(dice.randint(1, 40))
    whom: Whom = dice.choice(["leader", "follower", "anybody", "everybody"])
    acts: tuple[Act, ...] = (
        Reclaim(when, whom, notice=dice.chance(0.5)),
        Freeze(when, dice.uniform(1.0, 60.0), whom),
        Crash(when, whom),
        Isolate(when, dice.uniform(1.0, 60.0), whom, *dice.choice(_WAYS)),
        Outage(when, dice.uniform(1.0, 60.0)),
    )
    return dice.choice(acts)
