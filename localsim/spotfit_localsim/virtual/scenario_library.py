"""Named scenarios, and random scenarios from a seed: storms, saves, deadlines and budgets."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from spotfit.model.offer import Market
from spotfit.model.spec import (
    CostSpec,
    FailureLimits,
    FeederSpec,
    HangDetectionConfig,
    RetentionConfig,
    RunTiming,
)
from spotfit_localsim.random_streams import RandomStream, SeededStreams
from spotfit_localsim.traces import CapacityTrace
from spotfit_localsim.virtual.cost_invariants import CostBounds
from spotfit_localsim.virtual.engine import wall_ms
from spotfit_localsim.virtual.faults import FaultConfig
from spotfit_localsim.virtual.market import (
    SimMarketConfig,
    SimOfferConfig,
    price_at,
    random_levels,
    random_outages,
)
from spotfit_localsim.virtual.scenario import (
    AtMoveClosed,
    AtNetworkChange,
    AtStep,
    AtTime,
    BucketOutage,
    BucketStall,
    CancelRun,
    CrashAgent,
    FreezeAgent,
    InvalidCredentials,
    IsolateHost,
    KillForMemory,
    LaptopConfig,
    NextFit,
    RaiseInAgent,
    ReclaimMachine,
    Scenario,
    ScenarioEvent,
    SimNetworkConfig,
    TargetSelector,
)
from spotfit_localsim.virtual.sim_cloud import PROVISIONER_NAME
from spotfit_localsim.virtual.workload import (
    CacheFaults,
    DatasetWorkload,
    FeederFaults,
    UserCrash,
    ValidationWorkload,
    Workload,
)

ORDINARY_FAULTS = FaultConfig(
    lost_request_probability=0.01,
    lost_response_probability=0.01,
    slow_request_probability=0.02,
    freeze_probability=0.002,
    freeze_s=(0.2, 30.0),
)
"""Occasional faults of the bucket and of processes."""

_FLAWED_BUCKET_FAULTS = FaultConfig(
    lost_request_probability=0.1,
    false_conflict_probability=0.1,
    damaged_response_probability=0.01,
)

_HOSTILE_BUCKET_FAULTS = FaultConfig(
    lost_request_probability=0.1,
    lost_response_probability=0.03,
    conflict_probability=0.2,
    flipped_response_probability=0.02,
    truncated_response_probability=0.02,
    denied_create_probability=0.03,
    slow_request_probability=0.05,
    stall_probability=0.005,
)
"""Every answer that a bucket or a damaged connection may give, and much more often."""

LONG_WORKLOAD = Workload(steps=60, save_every=6)

# Without faults: a failure here is a failure of every run.
plain = Scenario("plain")

# Each machine is preempted about once per minute, and agents crash now and then.
spot_storm = Scenario(
    "spot_storm",
    workload=LONG_WORKLOAD,
    market=SimMarketConfig(reclaims_per_hour=60.0, notice_probability=0.5, boot_s=(3.0, 15.0)),
    faults=replace(ORDINARY_FAULTS, crash_probability=0.0003),
)

# All machines are lost, none is available for 95 s, and all return.
zone_outage = Scenario(
    "zone_outage",
    workload=LONG_WORKLOAD,
    market=SimMarketConfig(capacity=CapacityTrace("outage", ((0.0, 4), (25.0, 0), (120.0, 4)))),
)

# Some requests take longer than the client timeout, while a new leader must be elected.
slow_bucket = Scenario(
    "slow_bucket",
    faults=FaultConfig(
        lost_request_probability=0.05,
        lost_response_probability=0.05,
        slow_request_probability=0.3,
        slow_latency_s=(0.5, 12.0),
    ),
    events=(ReclaimMachine(AtStep(12), "leader"),),
)

# A tenth of the requests fails, conflicts are reported wrongly and responses are damaged, while a
# new leader must be elected.
flawed_bucket = Scenario(
    "flawed_bucket",
    faults=_FLAWED_BUCKET_FAULTS,
    events=(ReclaimMachine(AtStep(12), "leader"),),
)

# A tenth of the requests fails, a fifth of the creates meets a conflict, and reads are changed or
# truncated, while a new leader must be elected twice.
hostile_bucket = Scenario(
    "hostile_bucket",
    workload=LONG_WORKLOAD,
    faults=_HOSTILE_BUCKET_FAULTS,
    events=(ReclaimMachine(AtStep(12), "leader"), FreezeAgent(AtStep(30), 40.0, "leader")),
)

# Two of three machines are granted; they are released and requested again until a third one is
# available.
partial_capacity = Scenario(
    "partial_capacity",
    num_workers=3,
    slots_per_machine=1,
    market=SimMarketConfig(capacity=CapacityTrace("two of three", ((0.0, 2), (500.0, 3)))),
    timing=RunTiming(partial_capacity_timeout_s=25.0, partial_capacity_pause_s=40.0),
    faults_duration_s=900.0,
)

# The same without the client that called fit(): the leader requests again before it releases its
# own machine.
partial_capacity_without_driver = replace(
    partial_capacity,
    name="partial_capacity_without_driver",
    laptop=LaptopConfig(dies_at_s=30.0, sweep_interval_s=None),
)

# The run is ended by its time budget, although its leader is lost several times before.
time_budget = Scenario(
    "time_budget",
    workload=Workload(steps=1000, save_every=6, uses_snapshots=True),
    time_budget_s=120.0,
    events=tuple(ReclaimMachine(AtTime(at_s), "leader") for at_s in (25.0, 60.0, 95.0)),
    expected_outcome="cancelled",
)

# The same while too few machines are available for a round.
time_budget_while_waiting = Scenario(
    "time_budget_while_waiting",
    market=SimMarketConfig(capacity=CapacityTrace("one", ((0.0, 1),))),
    time_budget_s=60.0,
    expected_outcome="cancelled",
)

# The credentials are invalid for 30 s while one of two machines is replaced.
invalid_credentials = Scenario(
    "invalid_credentials",
    num_workers=2,
    slots_per_machine=1,
    workload=LONG_WORKLOAD,
    events=(ReclaimMachine(AtTime(39.0), "follower"), InvalidCredentials(AtTime(40.0), 30.0)),
)

# A machine is killed because it exceeds its memory limit, once. The backend says so before the loss
# is established without its report.
memory_kill = Scenario(
    "memory_kill",
    workload=LONG_WORKLOAD,
    market=SimMarketConfig(status_lag_s=(0.5, 2.0)),
    failure_limits=FailureLimits(worker=1, preemption=0),
    events=(KillForMemory(AtStep(20), "follower"),),
)

# Replacements are killed as well: the run must not rent machines without end.
memory_kills_of_all_replacements = Scenario(
    "memory_kills_of_all_replacements",
    workload=LONG_WORKLOAD,
    market=SimMarketConfig(status_lag_s=(0.5, 2.0)),
    failure_limits=FailureLimits(worker=2),
    events=tuple(KillForMemory(AtStep(step), "follower") for step in (10, 20, 30)),
    expected_outcome="failed",
)

# No machine reaches another one: the run ends instead of renting more of them.
firewall = Scenario(
    "firewall",
    network=SimNetworkConfig(is_firewalled=True),
    expected_outcome="failed",
)

# The run shrinks to one machine, which is leader and only worker, and grows again.
lone_survivor = Scenario(
    "lone_survivor",
    num_workers=6,
    min_workers=1,
    slots_per_machine=1,
    workload=LONG_WORKLOAD,
    market=SimMarketConfig(
        capacity=CapacityTrace("one is left", ((0.0, 6), (30.0, 1), (100.0, 6)))
    ),
)

# The leader is suspended longer than its lease, and resumes after its successor was elected.
deposed_leader = Scenario(
    "deposed_leader",
    workload=LONG_WORKLOAD,
    faults=replace(ORDINARY_FAULTS, freeze_probability=0.0),
    events=(FreezeAgent(AtStep(10), 60.0, "leader"), FreezeAgent(AtStep(30), 40.0, "leader")),
)

# No agent is left: only the client that called fit() can request machines.
all_machines_reclaimed = Scenario(
    "all_machines_reclaimed",
    workload=LONG_WORKLOAD,
    events=(ReclaimMachine(AtStep(20), "all"), ReclaimMachine(AtStep(45), "all")),
)

# With that client off as well, the run waits for a sweep.
all_machines_reclaimed_without_driver = replace(
    all_machines_reclaimed,
    name="all_machines_reclaimed_without_driver",
    laptop=LaptopConfig(dies_at_s=15.0),
)

# Connections break faster than rounds form: heartbeats and rejoins must not livelock.
flapping_network = Scenario(
    "flapping_network",
    workload=LONG_WORKLOAD,
    network=SimNetworkConfig(
        latency_s=(0.001, 0.01), resets_per_hour=200.0, partitions_per_hour=120.0
    ),
    faults=ORDINARY_FAULTS,
)

# A leader that receives but cannot send, then a follower that sends but cannot receive.
one_way_partition = Scenario(
    "one_way_partition",
    workload=LONG_WORKLOAD,
    events=(
        IsolateHost(AtStep(8), 40.0, "leader", blocks_outbound=True, blocks_inbound=False),
        IsolateHost(AtStep(30), 40.0, "follower", blocks_outbound=False, blocks_inbound=True),
    ),
)

# The second outage outlasts the lease, and a machine is lost meanwhile.
bucket_outage = Scenario(
    "bucket_outage",
    workload=LONG_WORKLOAD,
    laptop=LaptopConfig(sweep_interval_s=50.0, sweeps_from_start=True),
    events=(
        BucketOutage(AtStep(10), 15.0),
        BucketOutage(AtStep(30), 50.0),
        ReclaimMachine(AtStep(32), "follower"),
    ),
)

# Requests hang instead of failing: some are executed after the client's timeout.
bucket_stalls = Scenario(
    "bucket_stalls",
    workload=LONG_WORKLOAD,
    faults=FaultConfig(stall_probability=0.01),
    events=(
        BucketStall(AtStep(10), 30.0),
        BucketStall(AtStep(30), 8.0),
        ReclaimMachine(AtStep(32), "follower"),
    ),
)

# The client is off before the first machine has booted; the agents must be enough.
laptop_dies = Scenario(
    "laptop_dies",
    workload=LONG_WORKLOAD,
    laptop=LaptopConfig(dies_at_s=0.7),
    events=(ReclaimMachine(AtStep(10), "follower"), ReclaimMachine(AtStep(20), "leader")),
)

# Every change of the capacity changes the world size.
elastic_shrink_grow = Scenario(
    "elastic_shrink_grow",
    num_workers=8,
    min_workers=2,
    workload=Workload(steps=120, save_every=6),
    timing=RunTiming(round_fill_timeout_s=10.0),
    market=SimMarketConfig(
        capacity=CapacityTrace("waves", ((0.0, 4), (40.0, 2), (70.0, 4), (90.0, 1), (110.0, 4)))
    ),
)

# Three failures of the user code and a budget of three: the run must finish.
worker_crashes_within_budget = Scenario(
    "worker_crashes_within_budget",
    failure_limits=FailureLimits(worker=3),
    workload=Workload(
        crashes=(UserCrash(10, rank=1), UserCrash(13, rank=0, kind="dies"), UserCrash(30, rank=3))
    ),
)

# A rank that hangs sends no heartbeat, and no process of it exits.
hanging_rank = Scenario(
    "hanging_rank",
    failure_limits=FailureLimits(worker=2),
    workload=Workload(
        crashes=(UserCrash(10, rank=1, kind="hangs"), UserCrash(25, rank=3, kind="hangs"))
    ),
    hang_detection=HangDetectionConfig(worker_timeout_s=20.0),
)

budget_exhausted = Scenario(
    "budget_exhausted",
    failure_limits=FailureLimits(worker=1),
    workload=Workload(crashes=(UserCrash(10, rank=1, times=5),)),
    expected_outcome="failed",
)

# A run may also forbid preemptions.
preemption_budget_exhausted = Scenario(
    "preemption_budget_exhausted",
    failure_limits=FailureLimits(preemption=0),
    events=(ReclaimMachine(AtStep(10), "follower"),),
    expected_outcome="failed",
)

# A third process cancels by a journal entry; leader and client must both act on it.
cancel_midway = Scenario(
    "cancel_midway",
    faults=ORDINARY_FAULTS,
    events=(CancelRun(AtStep(15)),),
    expected_outcome="cancelled",
)

# The replacement is requested and the state is saved before the machine is lost.
preemption_with_notice = Scenario(
    "preemption_with_notice",
    workload=LONG_WORKLOAD,
    events=(
        ReclaimMachine(AtStep(10), "follower", with_notice=True),
        ReclaimMachine(AtStep(40), "leader", with_notice=True),
    ),
)

# Half of the machines are paid for but never join: the boot timeout replaces them.
failed_boots = Scenario(
    "failed_boots",
    timing=RunTiming(boot_timeout_s=60.0),
    market=SimMarketConfig(boot_failure_probability=0.5),
    faults_duration_s=200.0,
)

# A request may have created machines although it failed: the token makes it idempotent.
lost_cloud_responses = Scenario(
    "lost_cloud_responses",
    workload=LONG_WORKLOAD,
    market=SimMarketConfig(
        lost_response_probability=0.3,
        refusal_probability=0.3,
        rejects_when_full=True,
        reclaims_per_hour=40.0,
    ),
    faults=replace(ORDINARY_FAULTS, crash_probability=0.0005),
)

# The first fit is cancelled while machines are requested from its cloud, and its laptop dies before
# it knows what became of them. The next fit uses another cloud.
backend_change = Scenario(
    "backend_change",
    workload=LONG_WORKLOAD,
    market=SimMarketConfig(lost_response_probability=0.5, boot_failure_probability=0.3),
    timing=RunTiming(boot_timeout_s=60.0),
    laptop=LaptopConfig(dies_at_s=6.0, sweep_interval_s=60.0),
    next_fit=NextFit(called_at_s=3.0, num_workers=2),
    events=(CancelRun(AtTime(2.0)),),
)

# The same while the first cloud trains, and machines are lost during the change.
backend_change_in_training = Scenario(
    "backend_change_in_training",
    workload=LONG_WORKLOAD,
    market=SimMarketConfig(lost_response_probability=0.2, reclaims_per_hour=40.0),
    faults=ORDINARY_FAULTS,
    laptop=LaptopConfig(dies_at_s=40.0, sweep_interval_s=60.0),
    next_fit=NextFit(called_at_s=35.0),
    events=(CrashAgent(AtTime(31.0), "leader"), CancelRun(AtTime(30.0))),
)

# The best checkpoint by score is the oldest, but the latest must be kept for the restart.
checkpoint_retention = Scenario(
    "checkpoint_retention",
    workload=Workload(steps=80, save_every=3),
    retention=RetentionConfig(num_to_keep=2, score_attribute="step", score_order="min"),
    faults=ORDINARY_FAULTS,
    events=(CrashAgent(AtStep(25), "leader"), CrashAgent(AtStep(50), "follower")),
)

# After a rollback the user code names a checkpoint as one that exists or was half uploaded.
reused_checkpoint_names = Scenario(
    "reused_checkpoint_names",
    workload=replace(LONG_WORKLOAD, checkpoint_naming="by_step", upload_s=(0.5, 4.0)),
    events=(
        ReclaimMachine(AtStep(14), "follower"),
        ReclaimMachine(AtStep(25), "leader"),
        CrashAgent(AtStep(37), "any"),
    ),
)

# Every checkpoint replaces the previous one, which must stay readable until the commit.
single_checkpoint_name = Scenario(
    "single_checkpoint_name",
    workload=replace(
        LONG_WORKLOAD, checkpoint_naming="fixed", upload_s=(0.5, 4.0), uploads_in_background=True
    ),
    faults=ORDINARY_FAULTS,
    events=reused_checkpoint_names.events,
)

# Workers die while the uploader of their machine still uploads what they reported.
uploads_outlive_workers = Scenario(
    "uploads_outlive_workers",
    workload=Workload(
        steps=40,
        save_every=10,
        upload_s=(3.0, 4.0),
        uploads_in_background=True,
        crashes=tuple(UserCrash(step, kind="dies") for step in (11, 22, 33)),
    ),
    failure_limits=FailureLimits(worker=3),
)

late_replicas = Scenario(
    "late_replicas",
    workload=Workload(
        steps=60,
        save_every=2,
        upload_s=(0.05, 0.2),
        uses_snapshots=True,
        replication_s=(0.1, 0.7),
    ),
    events=tuple(ReclaimMachine(AtStep(step), "follower") for step in (15, 31, 47)),
)
"""Commits complete before replicas: the replica of a lost machine on its peer is older."""

rollback = Scenario(
    "rollback",
    workload=Workload(
        steps=60,
        save_every=2,
        upload_s=(0.5, 2.0),
        uses_snapshots=True,
        replication_s=(0.01, 0.1),
        rollback_probability=0.3,
        crashes=tuple(UserCrash(step, kind="dies") for step in (11, 23, 35, 47)),
    ),
    failure_limits=FailureLimits(worker=4),
)
"""Rolled-back snapshots still have replicas on peers when workers die."""

save_at_end = Scenario(
    "save_at_end",
    workload=Workload(
        steps=11,
        save_every=4,
        upload_s=(0.5, 6.0),
        uses_snapshots=True,
        replication_s=(0.01, 0.5),
        saves_at_end=True,
        awaits_reports=True,
    ),
    market=SimMarketConfig(reclaims_per_hour=120.0, notice_probability=0.3),
)
"""The last three steps are saved after the return, and machines are lost during that save."""

uneven_end = Scenario(
    "uneven_end",
    workload=replace(save_at_end.workload, extra_steps=2),
    market=save_at_end.market,
)
"""One rank makes two more steps than the others."""

# No connection is closed: only missing heartbeats reveal a lost machine.
silent_machine_loss = Scenario(
    "silent_machine_loss",
    workload=LONG_WORKLOAD,
    market=SimMarketConfig(
        clean_close_probability=0.0, reclaims_per_hour=40.0, notice_probability=0.0
    ),
)

# The leader's host does not respond any more: its successor is elected when the lease has expired.
silent_leader_loss = Scenario(
    "silent_leader_loss",
    workload=LONG_WORKLOAD,
    market=SimMarketConfig(clean_close_probability=0.0),
    events=(ReclaimMachine(AtStep(20), "leader"),),
)

# The next round opens before the loss of the machine is established.
elastic_machine_loss = Scenario(
    "elastic_machine_loss",
    num_workers=6,
    min_workers=2,
    workload=LONG_WORKLOAD,
    timing=RunTiming(round_fill_timeout_s=1.0),
    market=SimMarketConfig(boot_s=(5.0, 5.5), clean_close_probability=1.0, status_lag_s=(4.0, 5.0)),
    events=(ReclaimMachine(AtStep(20), "follower"),),
)

# A single error in spotfit: it is retried, and is no preemption.
agent_crash = Scenario(
    "agent_crash",
    workload=LONG_WORKLOAD,
    failure_limits=FailureLimits(preemption=0),
    events=(RaiseInAgent(AtStep(20), "leader"),),
)

# The same error on every machine: the run must not rent machines forever.
crash_loop = Scenario(
    "crash_loop",
    workload=Workload(steps=2000, save_every=6),
    events=(RaiseInAgent(AtStep(10), "leader", interval_s=30.0),),
    expected_outcome="failed",
)

# An image without spotfit.
no_agent_starts = Scenario(
    "no_agent_starts",
    market=SimMarketConfig(failed_start_probability=1.0),
    expected_outcome="failed",
)

# Some machines are broken, others start: the run must finish.
broken_machines = Scenario(
    "broken_machines",
    workload=LONG_WORKLOAD,
    num_workers=6,
    slots_per_machine=1,
    market=SimMarketConfig(failed_start_probability=0.3),
    events=(ReclaimMachine(AtStep(20), "follower"),),
)

# Validations are lost with their machines and repeated; retention waits for their scores.
validation_under_faults = Scenario(
    "validation_under_faults",
    workload=replace(LONG_WORKLOAD, validations=ValidationWorkload()),
    retention=RetentionConfig(num_to_keep=1, score_attribute="score"),
    timing=RunTiming(validator_wait_timeout_s=30.0, validator_idle_timeout_s=20.0),
    market=SimMarketConfig(
        reclaims_per_hour=60.0, notice_probability=0.5, boot_s=(3.0, 15.0), refusal_probability=0.2
    ),
    faults=replace(ORDINARY_FAULTS, crash_probability=0.0003),
)

# The training ends long before its validations, and the client is off.
validation_after_training = Scenario(
    "validation_after_training",
    workload=replace(
        LONG_WORKLOAD, validations=ValidationWorkload(duration_s=(30.0, 60.0), timeout_s=45.0)
    ),
    laptop=LaptopConfig(dies_at_s=20.0),
    timing=RunTiming(validator_idle_timeout_s=20.0),
    market=SimMarketConfig(reclaims_per_hour=40.0),
    faults_duration_s=600.0,
)

# Machines for feeders come and go with the market; the workers wait for rows without them.
feeders_under_faults = Scenario(
    "feeders_under_faults",
    workload=replace(LONG_WORKLOAD, data_wait_share=0.4, share_per_feeder=0.1),
    feeders=FeederSpec(min_nodes=2, max_nodes=4, resources={"CPU": 1.0}),
    market=SimMarketConfig(
        reclaims_per_hour=60.0, notice_probability=0.5, boot_s=(3.0, 15.0), refusal_probability=0.2
    ),
    faults=replace(ORDINARY_FAULTS, crash_probability=0.0003),
)

# All resizes within the first of two epochs, each by a loss or by new machines.
resizes_within_an_epoch = Scenario(
    "resizes_within_an_epoch",
    num_workers=8,
    min_workers=2,
    slots_per_machine=1,
    workload=Workload(
        steps=130,
        save_every=2,
        uses_snapshots=True,
        dataset=DatasetWorkload(unit_rows=(40, 7, 0, 93, 120, 1, 60) * 8, augments=True),
    ),
    timing=RunTiming(round_fill_timeout_s=5.0),
    resize_interval_s=1.0,
    market=SimMarketConfig(
        boot_s=(1.0, 3.0),
        clean_close_probability=1.0,
        capacity=CapacityTrace(
            "4, 2, 3, 8",
            ((0.0, 4), (20.0, 2), (40.0, 3), (55.0, 8)),
        ),
    ),
)

# The same rows from machines for feeders, which are lost, fail, hang and are unreachable.
feeders_of_a_dataset = Scenario(
    "feeders_of_a_dataset",
    min_workers=2,
    workload=replace(
        LONG_WORKLOAD,
        uses_snapshots=True,
        dataset=DatasetWorkload(
            unit_rows=(40, 7, 0, 93, 120, 1, 60),
            batch_rows=48,
            augments=True,
            feeders=FeederFaults(failure_probability=0.02, hang_probability=0.01),
        ),
    ),
    feeders=FeederSpec(min_nodes=2, max_nodes=3, resources={"CPU": 1.0}),
    market=SimMarketConfig(
        boot_s=(1.0, 3.0), reclaims_per_hour=60.0, notice_probability=0.3, status_lag_s=(0.5, 2.0)
    ),
    network=SimNetworkConfig(partitions_per_hour=60.0),
)

_TWO_TYPES = (
    SimOfferConfig(name="gpu", prices=((0.0, 8.0),), reclaims_per_hour=20.0),
    SimOfferConfig(
        name="cpu",
        prices=((0.0, 0.5),),
        machine_type="cpu",
        for_feeders=True,
        reclaims_per_hour=60.0,
        refusal_probability=0.2,
    ),
)

# The machines for feeders are of a second, cheaper type, which workers never use.
feeders_of_another_backend = Scenario(
    "feeders_of_another_backend",
    workload=replace(LONG_WORKLOAD, data_wait_share=0.4, share_per_feeder=0.1),
    feeders=FeederSpec(min_nodes=2, max_nodes=4, resources={"CPU": 1.0}),
    market=SimMarketConfig(offers=_TWO_TYPES, lost_response_probability=0.1),
    faults=replace(ORDINARY_FAULTS, crash_probability=0.0003),
    # The cloud chooses the offer: none has a number of machines.
    cost=CostSpec(offers=SimMarketConfig(offers=_TWO_TYPES).offers_at(0.0, PROVISIONER_NAME)),
)

# The next fit, on another cloud, has to release the machines for feeders of the first one, too.
backend_change_with_feeders = replace(
    feeders_of_another_backend,
    name="backend_change_with_feeders",
    laptop=LaptopConfig(dies_at_s=90.0, sweep_interval_s=60.0),
    next_fit=NextFit(called_at_s=85.0),
    events=(CrashAgent(AtTime(81.0), "leader"), CancelRun(AtTime(80.0))),
)

SCENARIOS: tuple[Scenario, ...] = (
    feeders_of_another_backend,
    backend_change_with_feeders,
    resizes_within_an_epoch,
    feeders_of_a_dataset,
    feeders_under_faults,
    plain,
    spot_storm,
    zone_outage,
    partial_capacity,
    partial_capacity_without_driver,
    invalid_credentials,
    memory_kill,
    memory_kills_of_all_replacements,
    firewall,
    time_budget,
    time_budget_while_waiting,
    slow_bucket,
    flawed_bucket,
    hostile_bucket,
    lone_survivor,
    deposed_leader,
    all_machines_reclaimed,
    all_machines_reclaimed_without_driver,
    flapping_network,
    one_way_partition,
    bucket_outage,
    bucket_stalls,
    laptop_dies,
    elastic_shrink_grow,
    worker_crashes_within_budget,
    budget_exhausted,
    preemption_budget_exhausted,
    cancel_midway,
    preemption_with_notice,
    failed_boots,
    lost_cloud_responses,
    backend_change,
    backend_change_in_training,
    checkpoint_retention,
    reused_checkpoint_names,
    single_checkpoint_name,
    uploads_outlive_workers,
    late_replicas,
    rollback,
    save_at_end,
    uneven_end,
    hanging_rank,
    silent_machine_loss,
    silent_leader_loss,
    elastic_machine_loss,
    agent_crash,
    crash_loop,
    no_agent_starts,
    broken_machines,
    validation_under_faults,
    validation_after_training,
)


def random_scenario(seed: int) -> Scenario:
    """Return a scenario with all parameters drawn from the seed, within what a run must survive."""
    rng = SeededStreams(seed).stream("storm")
    slots = rng.choice([1, 1, 2, 2, 4])
    workers = slots * rng.choice([1, 2, 2, 3, 4])
    elastic = rng.bernoulli(0.4)
    # Not in elastic runs: the rank that crashes might not exist at its step.
    crashes = _draw_crashes(rng, workers) if rng.bernoulli(0.3) and not elastic else ()
    market = _draw_market(rng)
    # A sweep must outlast the boot timeout to replace a machine whose agent never starts.
    sweep_s = 180.0 if market.boot_failure_probability else 45.0
    # The order of the arguments is the order of the draws: it is part of every seed.
    scenario = Scenario(
        f"storm {seed}",
        num_workers=workers,
        min_workers=rng.randint(1, workers) if elastic else None,
        slots_per_machine=slots,
        workload=_draw_workload(rng, crashes, seed),
        market=market,
        faults=_draw_faults(rng),
        network=SimNetworkConfig(
            latency_s=(0.0005, rng.choice([0.003, 0.02, 0.2])),
            resets_per_hour=rng.choice([0.0, 0.0, 60.0, 300.0]),
            partitions_per_hour=rng.choice([0.0, 0.0, 30.0, 150.0]),
        ),
        failure_limits=FailureLimits(worker=len(crashes)),
        retention=RetentionConfig(
            num_to_keep=rng.choice([None, 1, 2]), score_attribute=rng.choice([None, "step"])
        ),
        timing=RunTiming(round_fill_timeout_s=rng.choice([5.0, 60.0]), boot_timeout_s=120.0),
        laptop=LaptopConfig(
            dies_at_s=rng.uniform(0.5, 200.0) if rng.bernoulli(0.5) else None,
            sweep_interval_s=sweep_s + 45.0,
            sweep_duration_s=sweep_s,
            sweeps_from_start=rng.bernoulli(0.2),
        ),
        events=tuple(_draw_event(rng) for _ in range(rng.choice([0, 0, 1, 2, 3]))),
        clock_skew=rng.choice([0.0, 0.0005, 0.02]),
        faults_duration_s=rng.uniform(60.0, 300.0),
    )
    return _add_later_faults(scenario, seed)


def _add_later_faults(scenario: Scenario, seed: int) -> Scenario:
    """Add the kinds of faults that were written after the first seeds, by streams of their own."""
    scenario = _add_stalls(scenario, SeededStreams(seed).stream("stalls"))
    # The other seeds keep the faults that they had before these buckets existed.
    if seed % 8 == 7:
        scenario = replace(scenario, faults=_with_flawed_bucket(scenario.faults))
    # The first ones detect the known-wrong variants.
    elif seed >= 1000 and seed % 16 in (3, 5):
        scenario = _add_hostile_bucket(scenario, SeededStreams(seed).stream("answers"))
    # Seeds of their own, so that the others keep their market.
    if seed % 5 in (1, 3):
        rng_of_cloud = SeededStreams(seed).stream("restarts")
        market = replace(
            scenario.market,
            restarts_per_machine=rng_of_cloud.choice([0, 1, 3, 10]),
            read_lag_s=rng_of_cloud.choice([0.0, 3.0, 20.0]),
        )
        scenario = replace(scenario, market=market)
    # Seeds of their own as well; the first ones detect the known-wrong variants.
    if seed >= 1000 and seed % 7 in (2, 4):
        scenario = _add_account_faults(scenario, SeededStreams(seed).stream("account"))
    # By a stream of its own: all seeds keep their faults.
    if SeededStreams(seed).stream("billing").bernoulli(0.3):
        scenario = replace(scenario, market=replace(scenario.market, reports_times=False))
    # Half of the seeds validate; the others keep the scenario they had before validations existed.
    if seed % 4 in (0, 3):
        return _add_validations(scenario, SeededStreams(seed).stream("validations"))
    return scenario


def random_save_scenario(seed: int) -> Scenario:
    """Return `random_scenario(seed)` with frequent saves by all ranks through snapshots."""
    scenario = random_scenario(seed)
    rng = SeededStreams(seed).stream("saves")
    workload = replace(
        scenario.workload,
        uses_snapshots=True,
        validations=None,
        checkpoint_naming="generated",
        save_every=rng.choice([1, 2, 4]),
        snapshot_stall_s=(0.001, rng.choice([0.01, 0.5])),
        replication_s=(0.01, rng.choice([0.1, 1.0, 10.0])),
        rollback_probability=SeededStreams(seed).stream("back").choice([0.0, 0.0, 0.0, 0.1]),
    )
    rng_of_end = SeededStreams(seed).stream("end")
    workload = replace(
        workload,
        steps=workload.steps + rng_of_end.choice([0, 1, 3]),
        saves_at_end=rng_of_end.bernoulli(0.9),
        extra_steps=rng_of_end.choice([0, 0, 0, 2]),
        awaits_reports=rng_of_end.bernoulli(0.3),
    )
    retention = structs.replace(scenario.retention, score_attribute=rng.choice([None, "step"]))
    return replace(scenario, name=f"saves {seed}", workload=workload, retention=retention)


def dataset_scenario(seed: int) -> Scenario:
    """Return a storm, with or without snapshots, whose ranks train on a dataset.

    Most groups are elastic, and half of these change their size by the capacity of the market.
    """
    streams = SeededStreams(seed)
    rng = streams.stream("dataset of the scenario")
    scenario = (random_save_scenario if rng.bernoulli(0.5) else random_scenario)(seed)
    workers = scenario.num_workers
    feeders = None
    if rng.bernoulli(0.5):
        nodes = rng.choice([1, 2, 3])
        feeders = FeederSpec(
            min_nodes=rng.choice([0, nodes]), max_nodes=nodes, resources={"CPU": 1.0}
        )
    if scenario.min_workers is None and not scenario.workload.crashes and rng.bernoulli(0.7):
        scenario = replace(scenario, min_workers=rng.randint(1, workers))
    if scenario.min_workers is not None and rng.bernoulli(0.5):
        times = sorted(rng.uniform(10.0, 200.0) for _ in range(rng.randint(1, 5)))
        machines = -(-workers // scenario.slots_per_machine)
        points = tuple((time, rng.randint(1, machines)) for time in times)
        trace = CapacityTrace("resizes", ((0.0, machines), *points))
        scenario = replace(
            scenario,
            market=replace(scenario.market, capacity=trace),
            resize_interval_s=rng.choice([1.0, 20.0]),
        )
    workload = replace(
        scenario.workload,
        # A rank without rows cannot make further steps.
        extra_steps=0,
        dataset=_draw_dataset(rng, workers, uses_snapshots=scenario.workload.uses_snapshots),
    )
    return replace(scenario, name=f"dataset {seed}", workload=workload, feeders=feeders)


def _draw_dataset(rng: RandomStream, workers: int, *, uses_snapshots: bool) -> DatasetWorkload:
    is_global = rng.bernoulli(0.6)
    batch_rows = rng.choice([workers, 24, 37, 48]) if is_global else rng.randint(1, 12)
    batch_rows = max(batch_rows, workers) if is_global else batch_rows
    step_rows = batch_rows if is_global else batch_rows * workers
    largest = rng.choice([1, 10, 60])
    # At least a step of all ranks, so that no epoch is empty.
    units = [rng.choice([0, 1, rng.randint(1, largest)]) for _ in range(rng.randint(1, 40))]
    units.append(
        max(step_rows * rng.choice([1, 4, 20, 40]) - sum(units), 1, step_rows - sum(units))
    )
    return DatasetWorkload(
        unit_rows=tuple(rng.sample(units, len(units))),
        row_bytes=rng.choice([100, 2 * 2**20]),
        seed=rng.randrange(2**32),
        batch_rows=batch_rows,
        is_global=is_global,
        shuffle=rng.choice(["none", "units", "rows", "rows"]),
        buffer_rows=rng.choice([None, None, None, max(step_rows, 40)]),
        augments=rng.bernoulli(0.7),
        prefetch_batches=rng.choice([0, 1, 1, 4]),
        drop_last=rng.bernoulli(0.2),
        counts_steps=uses_snapshots and rng.bernoulli(0.7),
        feeders=FeederFaults(
            slice_s=(0.001, rng.choice([0.05, 0.5, 5.0])),
            failure_probability=rng.choice([0.0, 0.02, 0.2]),
            hang_probability=rng.choice([0.0, 0.0, 0.02]),
        ),
        cache=rng.choice([None, _draw_cache(rng)]),
    )


def _draw_cache(rng: RandomStream) -> CacheFaults:
    memory_bytes = rng.choice([0, 0, 2000, 10**6])
    return CacheFaults(
        memory_bytes=memory_bytes,
        disk_bytes=rng.choice([3000, 10**6, 10**6] if memory_bytes == 0 else [0, 3000, 10**6]),
        damage_probability=rng.choice([0.0, 0.1, 0.5]),
    )


def _add_stalls(scenario: Scenario, rng: RandomStream) -> Scenario:
    """Add random stalls to a third of the scenarios, and one long stall to half of these."""
    if not rng.bernoulli(0.35):
        return scenario
    faults = replace(scenario.faults, stall_probability=rng.choice([0.0, 0.002, 0.01, 0.05]))
    trigger = AtTime(rng.uniform(1.0, 200.0)) if rng.bernoulli(0.5) else AtStep(rng.randint(1, 40))
    stall = (BucketStall(trigger, rng.uniform(3.0, 60.0)),) if rng.bernoulli(0.5) else ()
    return replace(scenario, faults=faults, events=(*scenario.events, *stall))


def _add_validations(scenario: Scenario, rng: RandomStream) -> Scenario:
    retention = scenario.retention
    if retention.score_attribute is not None and rng.bernoulli(0.5):
        retention = structs.replace(retention, score_attribute="score")
    timing = structs.replace(
        scenario.timing,
        validator_wait_timeout_s=rng.choice([10.0, 60.0]),
        validator_idle_timeout_s=rng.choice([1.0, 20.0]),
    )
    validations = ValidationWorkload(
        fraction=rng.choice([0.3, 1.0]),
        duration_s=(0.1, rng.choice([1.0, 10.0, 25.0])),
        failure_probability=rng.choice([0.0, 0.2]),
        hang_probability=rng.choice([0.0, 0.1]),
        timeout_s=rng.choice([10.0, 30.0]),
        own_machine=rng.choice([None, None, True, False]),
    )
    # At worst every step is validated, one after the other, and every validation hangs.
    longest_s = scenario.workload.steps * validations.timeout_s
    return replace(
        scenario,
        workload=replace(scenario.workload, validations=validations),
        retention=retention,
        timing=timing,
        completion_timeout_s=scenario.completion_timeout_s + longest_s,
    )


def _draw_workload(rng: RandomStream, crashes: tuple[UserCrash, ...], seed: int) -> Workload:
    streams = SeededStreams(seed)
    workload = Workload(
        steps=rng.randint(10, 60),
        step_s=(0.1, rng.uniform(0.2, 1.5)),
        start_s=(0.05, rng.uniform(0.1, 3.0)),
        report_every=rng.choice([0, 1, 3]),
        save_every=rng.choice([0, 1, 4, 10]),
        upload_s=(0.05, rng.uniform(0.1, 5.0)),
        all_ranks_save=rng.bernoulli(0.6),
        saves_on_notice=rng.bernoulli(0.7),
        checkpoint_naming="by_step" if rng.bernoulli(0.3) else "generated",
        uses_barriers=rng.bernoulli(0.3),
        peer_error_probability=rng.choice([0.0, 0.5, 1.0]),
        exit_s=(0.005, rng.choice([0.05, 3.0])),
        crashes=crashes,
        # Later additions draw from streams of their own, which keeps the scenarios of older seeds.
        uploads_in_background=streams.stream("left to the agent").bernoulli(0.4),
    )
    if streams.stream("one name").bernoulli(0.2):
        return replace(workload, checkpoint_naming="fixed")
    return workload


def _draw_crashes(rng: RandomStream, workers: int) -> tuple[UserCrash, ...]:
    steps = rng.sample(range(1, 10), rng.randint(1, 3))
    return tuple(
        UserCrash(step, rank=rng.randrange(workers), kind=rng.choice(["raises", "dies"]))
        for step in steps
    )


def _draw_market(rng: RandomStream) -> SimMarketConfig:
    config = SimMarketConfig(
        reclaims_per_hour=rng.choice([0.0, 20.0, 60.0, 150.0]),
        notice_probability=rng.random(),
        notice_s=rng.choice([5.0, 30.0, 120.0]),
        boot_s=(1.0, rng.uniform(2.0, 30.0)),
        boot_failure_probability=rng.choice([0.0, 0.0, 0.1]),
        rejects_when_full=rng.bernoulli(0.5),
        refusal_probability=rng.choice([0.0, 0.0, 0.3]),
        clean_close_probability=rng.random(),
        lost_response_probability=rng.choice([0.0, 0.0, 0.1]),
    )
    if not rng.bernoulli(0.3):
        return config
    times = [0.0, *sorted(rng.uniform(10.0, 200.0) for _ in range(rng.randint(1, 5)))]
    points = tuple((time, rng.randint(0, 5)) for time in times)
    return replace(config, capacity=CapacityTrace("drawn", points))


def _draw_faults(rng: RandomStream) -> FaultConfig:
    if rng.bernoulli(0.2):
        return FaultConfig()
    return FaultConfig(
        lost_request_probability=rng.choice([0.0, 0.01, 0.05]),
        lost_response_probability=rng.choice([0.0, 0.01, 0.05]),
        slow_request_probability=rng.choice([0.0, 0.02, 0.1]),
        freeze_probability=rng.choice([0.0, 0.001, 0.01]),
        freeze_s=(0.2, rng.choice([3.0, 40.0])),
        crash_probability=rng.choice([0.0, 0.0002, 0.001]),
    )


def _with_flawed_bucket(faults: FaultConfig) -> FaultConfig:
    return replace(
        faults,
        lost_request_probability=_FLAWED_BUCKET_FAULTS.lost_request_probability,
        false_conflict_probability=_FLAWED_BUCKET_FAULTS.false_conflict_probability,
        damaged_response_probability=_FLAWED_BUCKET_FAULTS.damaged_response_probability,
    )


def _add_hostile_bucket(scenario: Scenario, rng: RandomStream) -> Scenario:
    faults = replace(
        scenario.faults,
        lost_request_probability=rng.choice([0.0, 0.03, 0.1]),
        conflict_probability=rng.choice([0.0, 0.1, 0.3]),
        flipped_response_probability=rng.choice([0.0, 0.01, 0.05]),
        truncated_response_probability=rng.choice([0.0, 0.01, 0.05]),
        denied_create_probability=rng.choice([0.0, 0.01, 0.05]),
    )
    return replace(scenario, faults=faults)


def _add_account_faults(scenario: Scenario, rng: RandomStream) -> Scenario:
    """Add what an account on a real cloud adds: capacity for a part of the machines, credentials
    that are invalid for some time, containers with memory limits, and a time budget.
    """
    market, limits, events = scenario.market, scenario.failure_limits, scenario.events
    timing = scenario.timing
    if rng.bernoulli(0.5):
        needed = -(-scenario.num_workers // scenario.slots_per_machine)
        times = (0.0, rng.uniform(20.0, 60.0), rng.uniform(60.0, 150.0), rng.uniform(150.0, 250.0))
        counts = (rng.choice([0, 1, max(1, needed - 1)]), needed, max(1, needed - 1), needed)
        points = tuple(zip(times, counts, strict=True))
        market = replace(market, capacity=CapacityTrace("a part", points))
        timing = structs.replace(
            timing,
            partial_capacity_timeout_s=rng.choice([15.0, 40.0, 900.0]),
            partial_capacity_pause_s=rng.choice([5.0, 30.0]),
        )
    if rng.bernoulli(0.5):
        # Credentials that are invalid before the first round end the run, as they should.
        events += (InvalidCredentials(AtStep(rng.randint(1, 40)), rng.uniform(5.0, 60.0)),)
    if rng.bernoulli(0.5):
        targets: list[TargetSelector] = ["leader", "follower", "any"]
        kills = tuple(
            KillForMemory(AtStep(rng.randint(1, 40)), rng.choice(targets))
            for _ in range(rng.randint(1, 3))
        )
        events += kills
        limits = structs.replace(limits, worker=limits.worker + len(kills))
    budget_s = rng.uniform(20.0, 600.0) if rng.bernoulli(0.3) else None
    return replace(
        scenario,
        market=market,
        timing=timing,
        failure_limits=limits,
        events=events,
        time_budget_s=budget_s,
        may_exceed_time_budget=budget_s is not None,
    )


_PARTITION_DIRECTIONS = ((True, True), (True, False), (False, True))


def _draw_event(rng: RandomStream) -> ScenarioEvent:
    # All event types draw, whichever is chosen: the next draws do not depend on the choice.
    trigger = AtTime(rng.uniform(1.0, 200.0)) if rng.bernoulli(0.3) else AtStep(rng.randint(1, 40))
    target: TargetSelector = rng.choice(["leader", "follower", "any", "all"])
    events: tuple[ScenarioEvent, ...] = (
        ReclaimMachine(trigger, target, with_notice=rng.bernoulli(0.5)),
        FreezeAgent(trigger, rng.uniform(1.0, 60.0), target),
        CrashAgent(trigger, target),
        IsolateHost(trigger, rng.uniform(1.0, 60.0), target, *rng.choice(_PARTITION_DIRECTIONS)),
        BucketOutage(trigger, rng.uniform(1.0, 60.0)),
    )
    return rng.choice(events)


# --- deadlines and budgets ------------------------------------------------------------------------

ON_DEMAND_ARRIVAL_S = 120.0
"""Longest time until on-demand machines of `deadline_scenario` are up, unless they are refused."""
_ON_DEMAND_USD = 10.0
_REGIONS = ("sim-east", "sim-west")
# Two readings of the journal (10 s), the start of a round, and an interruption of 20 s.
_CHANGE_S = 90.0
# To save, to release all machines, and to notice that this is necessary.
_BUDGET_MARGIN_S = 300.0
# For hours of virtual time: with the default intervals most events would be heartbeats.
_HOURLY_TIMING = RunTiming(
    heartbeat_interval_s=10.0,
    heartbeat_timeout_s=40.0,
    lease_interval_s=15.0,
    lease_timeout_s=60.0,
    observe_interval_s=10.0,
    journal_poll_interval_s=10.0,
    round_fill_timeout_s=20.0,
    # With the random part, and the release, shorter than `CostBounds.unused_s`.
    partial_capacity_timeout_s=300.0,
    price_interval_s=60.0,
)


def deadline_scenario(seed: int, *, changeover_s: float = 600.0) -> Scenario:
    """Return a run with a deadline on an adversarial spot market, drawn from the seed.

    The deadline leaves one changeover of `changeover_s` and 1.08 to 1.9 times the training time.
    There are one to four spot offers and one on-demand offer in one region. On-demand machines are
    never lost. They are up after `ON_DEMAND_ARRIVAL_S` at most, and refused in a fifth of the
    scenarios. Half of the groups are elastic, and most of these are slower with fewer workers.
    """
    rng, sizes = SeededStreams(seed).stream("deadline"), SeededStreams(seed).stream("elastic")
    workers, least = _draw_group_size(rng, sizes)
    is_elastic = least is not None
    workload = _draw_hourly_workload(rng)
    if is_elastic and sizes.bernoulli(0.8):
        workload = replace(workload, full_size=workers)
    training_s = workload.steps * workload.step_s[1] * 1.02
    deadline_s = training_s * rng.uniform(1.08, 1.9) + changeover_s
    market = _draw_offers(
        rng,
        machines=workers,
        duration_s=deadline_s + changeover_s,
        partial=sizes if is_elastic else None,
    )
    return Scenario(
        f"deadline {seed}",
        num_workers=workers,
        min_workers=1 if not is_elastic and workers > 1 and rng.bernoulli(0.25) else least,
        slots_per_machine=1,
        workload=workload,
        market=market,
        faults=_draw_short_faults(rng),
        timing=_HOURLY_TIMING,
        cost=CostSpec(
            offers=market.offers_at(0.0, PROVISIONER_NAME),
            machines=dict.fromkeys([one.name for one in market.offers], workers),
            deadline_ms=wall_ms(deadline_s),
            uses_on_demand=True,
            training_time_s=training_s,
        ),
        cost_limits=CostBounds(
            arrival_s=ON_DEMAND_ARRIVAL_S, changeover_s=changeover_s, set_size=workers
        ),
        laptop=LaptopConfig(
            dies_at_s=rng.uniform(10.0, deadline_s) if rng.bernoulli(0.3) else None,
            # A sweep takes the lead once the lease of the last leader has expired.
            sweep_interval_s=3 * _HOURLY_TIMING.lease_timeout_s,
            sweep_duration_s=2.5 * _HOURLY_TIMING.lease_timeout_s,
        ),
        events=tuple(_draw_short_event(rng, deadline_s) for _ in range(rng.choice([0, 1, 2, 4]))),
        wall_clock_error_s=rng.choice([0.0, 5.0, 7200.0]),
        clock_skew=rng.choice([0.0, 0.0005]),
        faults_duration_s=deadline_s + changeover_s,
        completion_timeout_s=2 * training_s + 3600.0,
        release_timeout_s=300.0,
    )


def _draw_group_size(rng: RandomStream, sizes: RandomStream) -> tuple[int, int | None]:
    """Return the number of workers and, of an elastic group, the smallest one."""
    workers = rng.choice([1, 2, 2, 3])
    if not sizes.bernoulli(0.4):
        return workers, None
    workers = sizes.choice([2, 3, 4, 6])
    return workers, sizes.choice([1, max(1, workers // 2)])


def _draw_hourly_workload(rng: RandomStream) -> Workload:
    """Return a workload of half an hour to almost two hours."""
    return Workload(
        steps=rng.randint(90, 300),
        step_s=(20.0, 21.0),
        report_every=1,
        save_every=rng.choice([1, 2, 5]),
        upload_s=(0.5, 5.0),
        uploads_in_background=True,
        uses_snapshots=rng.bernoulli(0.5),
        saves_at_end=True,
    )


def varying_capacity_scenario(seed: int, *, min_workers: int | None) -> Scenario:
    """Return a run of four workers with a loose deadline, whose zone has 0 to 4 spot machines.

    The number changes every 15 minutes on average. On-demand machines cost four times as much. The
    group has a fixed size without `min_workers`.
    """
    workers = 4
    workload = Workload(
        steps=180,
        step_s=(20.0, 21.0),
        report_every=1,
        save_every=2,
        upload_s=(0.5, 5.0),
        uploads_in_background=True,
        uses_snapshots=True,
        saves_at_end=True,
        full_size=workers,
    )
    training_s = workload.steps * workload.step_s[1] * 1.02
    deadline_s = 2 * training_s + 600.0
    rng = SeededStreams(seed).stream("capacity")
    levels = random_levels(rng, machines=workers, mean_s=900.0, duration_s=deadline_s + 600.0)
    boot_s = (20.0, 60.0)
    market = SimMarketConfig(
        offers=(
            SimOfferConfig(name="spot", prices=((0.0, 1.0),), capacity=levels, boot_s=boot_s),
            SimOfferConfig(
                name="on_demand", market=Market.ON_DEMAND, prices=((0.0, 4.0),), boot_s=boot_s
            ),
        ),
        rejects_when_full=True,
    )
    return Scenario(
        f"varying capacity {seed}",
        num_workers=workers,
        min_workers=min_workers,
        slots_per_machine=1,
        workload=workload,
        market=market,
        timing=_HOURLY_TIMING,
        cost=CostSpec(
            offers=market.offers_at(0.0, PROVISIONER_NAME),
            machines={one.name: workers for one in market.offers},
            deadline_ms=wall_ms(deadline_s),
            uses_on_demand=True,
            training_time_s=training_s,
            start_time_s=180.0,
        ),
        cost_limits=CostBounds(arrival_s=ON_DEMAND_ARRIVAL_S, changeover_s=600.0, set_size=workers),
        faults_duration_s=deadline_s + 600.0,
        completion_timeout_s=2 * training_s + 3600.0,
        release_timeout_s=300.0,
    )


def budget_scenario(seed: int) -> Scenario:
    """Return a run with a budget that may be too small, drawn from the seed; half have a deadline.

    The budget is 0.3 to 2 times the cost of the training on the cheapest offer without any loss. It
    may be exceeded by the cost of all on-demand machines for `_BUDGET_MARGIN_S`.
    """
    scenario = deadline_scenario(seed)
    rng = SeededStreams(seed).stream("budget")
    hours = (scenario.cost.training_time_s or 0.0) / 3600
    cheapest_usd = min(price_at(one.prices, 0.0) for one in scenario.market.offers)
    cost = structs.replace(
        scenario.cost,
        budget_usd=round(rng.uniform(0.3, 2.0) * scenario.num_workers * hours * cheapest_usd, 2),
        deadline_ms=scenario.cost.deadline_ms if rng.bernoulli(0.5) else None,
    )
    cost = structs.replace(cost, uses_on_demand=cost.deadline_ms is not None)
    assert scenario.cost_limits is not None
    margin_usd = scenario.num_workers * _BUDGET_MARGIN_S / 3600 * _ON_DEMAND_USD
    return replace(
        scenario,
        name=f"budget {seed}",
        cost=cost,
        cost_limits=replace(scenario.cost_limits, margin_usd=margin_usd),
        may_exhaust_budget=True,
    )


def network_scenario(seed: int) -> Scenario:
    """Return a deadline or budget scenario whose offers are in two networks, drawn from the seed.

    Each network has on-demand machines. Leaders, other machines and the bucket may fail during the
    changes from one network to the other.
    """
    rng = SeededStreams(seed).stream("networks")
    scenario = (budget_scenario if rng.bernoulli(0.3) else deadline_scenario)(seed)
    spot = tuple(replace(one, region=rng.choice(_REGIONS)) for one in scenario.market.offers[:-1])
    dearer, cheaper = scenario.market.offers[-1], ((0.0, _ON_DEMAND_USD * rng.uniform(0.7, 1.0)),)
    on_demand = (
        replace(dearer, region=_REGIONS[0]),
        replace(dearer, name="on_demand-west", region=_REGIONS[1], prices=cheaper),
    )
    market = replace(scenario.market, offers=(*spot, *on_demand))
    assert scenario.cost_limits is not None
    return replace(
        scenario,
        name=f"network {seed}",
        market=market,
        cost=structs.replace(
            scenario.cost,
            offers=market.offers_at(0.0, PROVISIONER_NAME),
            machines=dict.fromkeys([one.name for one in market.offers], scenario.num_workers),
        ),
        cost_limits=replace(scenario.cost_limits, restart_s=_CHANGE_S),
        events=(*scenario.events, *(_draw_change_event(rng) for _ in range(rng.choice([0, 1, 3])))),
    )


def _draw_change_event(rng: RandomStream) -> ScenarioEvent:
    """Draw a loss or a short interruption during a change of the network."""
    kinds: tuple[type[AtMoveClosed | AtNetworkChange], ...] = (AtMoveClosed, AtNetworkChange)
    trigger = rng.choice(kinds)(
        after_s=rng.choice([0.0, rng.uniform(0.0, 3.0), rng.uniform(0.0, 40.0)]),
        number=rng.choice([1, 1, 2, 3]),
    )
    target: TargetSelector = rng.choice(["leader", "leader", "follower", "any", "all"])
    events: tuple[ScenarioEvent, ...] = (
        CrashAgent(trigger, target),
        ReclaimMachine(trigger, target),
        ReclaimMachine(trigger, target, with_notice=True),
        FreezeAgent(trigger, rng.uniform(1.0, 20.0), target),
        BucketOutage(trigger, rng.uniform(1.0, 15.0)),
        BucketStall(trigger, rng.uniform(1.0, 15.0)),
    )
    return rng.choice(events)


def _draw_offers(
    rng: RandomStream, *, machines: int, duration_s: float, partial: RandomStream | None = None
) -> SimMarketConfig:
    """With the random stream `partial`, half of the zones have fewer machines at times."""
    zones = "abcd"[: rng.choice([1, 1, 2, 3, 4])]
    spot = tuple(
        _draw_spot_offer(rng, zone, machines=machines, duration_s=duration_s) for zone in zones
    )
    if partial is not None:
        spot = tuple(_with_levels(one, partial, machines, duration_s) for one in spot)
    on_demand = SimOfferConfig(
        name="on_demand",
        market=Market.ON_DEMAND,
        prices=((0.0, _ON_DEMAND_USD),),
        boot_s=(20.0, ON_DEMAND_ARRIVAL_S - 40.0),
        grant_delay_s=(0.0, 30.0),
        refusal_probability=0.5 if rng.bernoulli(0.2) else 0.0,
        max_refused_s=300.0,
    )
    return SimMarketConfig(
        offers=(*spot, on_demand),
        notice_probability=rng.random(),
        notice_s=rng.choice([5.0, 30.0, 120.0]),
        drop_notice_probability=rng.choice([0.0, 0.0, 0.5, 1.0]),
        rejects_when_full=rng.bernoulli(0.5),
        clean_close_probability=rng.random(),
        lost_response_probability=rng.choice([0.0, 0.0, 0.05]),
    )


def _with_levels(
    offer: SimOfferConfig, rng: RandomStream, machines: int, duration_s: float
) -> SimOfferConfig:
    """The offer, in half of the draws with a capacity of 0 to `machines` machines."""
    if rng.bernoulli(0.5):
        return offer
    mean_s = rng.choice([120.0, 600.0, 2400.0])
    levels = random_levels(rng, machines=machines, mean_s=mean_s, duration_s=duration_s)
    return replace(offer, capacity=levels)


def _draw_spot_offer(
    rng: RandomStream, zone: str, *, machines: int, duration_s: float
) -> SimOfferConfig:
    """Draw a zone that is steady, has outages, changes every minute, ends, is always full, or loses
    machines directly after their start."""
    first_usd = _ON_DEMAND_USD / rng.choice([1.05, 1.5, 3.0, 5.0]) * rng.uniform(0.8, 1.2)
    times = sorted(rng.uniform(0.0, duration_s) for _ in range(rng.choice([0, 1, 3, 8])))
    changes = tuple((time, first_usd * rng.uniform(0.5, 2.5)) for time in times)
    offer = SimOfferConfig(
        name=f"spot-{zone}",
        prices=((0.0, first_usd), *changes),
        zone=f"sim-east-{zone}",
        boot_s=(5.0, rng.choice([20.0, 120.0])),
        refusal_probability=rng.choice([0.0, 0.3]),
        reclaims_per_hour=rng.choice([0.0, 0.5, 3.0, 12.0]),
    )
    outages_s = {"outages": (1200.0, 600.0), "unstable": (60.0, 60.0)}
    match rng.choice(["steady", "outages", "unstable", "withdrawn", "full", "early losses"]):
        case "outages" | "unstable" as kind:
            available_s, outage_s = outages_s[kind]
            trace = random_outages(
                rng,
                machines=machines + rng.choice([-1, 0, 2]),
                mean_available_s=available_s,
                mean_outage_s=outage_s,
                duration_s=duration_s,
            )
            return replace(offer, capacity=trace)
        case "withdrawn":
            end_s = rng.uniform(0.0, duration_s)
            points = ((0.0, machines), (end_s, 0))
            return replace(offer, capacity=CapacityTrace("withdrawn", points))
        case "full":
            return replace(offer, capacity=CapacityTrace("full", ((0.0, 0),)))
        case "early losses":
            return replace(offer, early_loss_probability=0.7, early_loss_s=(0.0, 60.0))
        case _:
            return offer


def _draw_short_faults(rng: RandomStream) -> FaultConfig:
    """Draw faults of the bucket that delay a change of machines by seconds only."""
    if rng.bernoulli(0.3):
        return FaultConfig()
    return FaultConfig(
        lost_request_probability=rng.choice([0.0, 0.01, 0.05]),
        lost_response_probability=rng.choice([0.0, 0.01, 0.05]),
        slow_request_probability=rng.choice([0.0, 0.02]),
        freeze_probability=rng.choice([0.0, 0.0002]),
        freeze_s=(0.2, 5.0),
    )


def _draw_short_event(rng: RandomStream, latest_s: float) -> ScenarioEvent:
    """Draw the loss of a spot machine, or an interruption that is shorter than the timeouts."""
    trigger = AtTime(rng.uniform(10.0, latest_s))
    events: tuple[ScenarioEvent, ...] = (
        ReclaimMachine(trigger, "leader"),
        ReclaimMachine(trigger, "leader", with_notice=True),
        ReclaimMachine(trigger, "all"),
        FreezeAgent(trigger, rng.uniform(1.0, 20.0), "leader"),
        BucketOutage(trigger, rng.uniform(1.0, 15.0)),
        BucketStall(trigger, rng.uniform(1.0, 15.0)),
    )
    return rng.choice(events)
