"""A simulated shard reads by the production code in virtual time, also through feeders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from spotfit.model.spec import FeederSpec
from spotfit.model.topology import FeederAddress
from spotfit.testing.builders import a_spec
from spotfit_localsim.random_streams import SeededStreams
from spotfit_localsim.virtual.engine import Engine
from spotfit_localsim.virtual.sim_dataset import SimDataset, SimShard
from spotfit_localsim.virtual.sim_feeders import SimFeederNode
from spotfit_localsim.virtual.trained_rows import RankBatch
from spotfit_localsim.virtual.workload import CacheFaults, DatasetWorkload, FeederFaults

PLAN = DatasetWorkload(unit_rows=(20, 12, 16), batch_rows=12, augments=True)


class Reading:
    """Shards of one rank each, read in the engine of the test."""

    def __init__(self, plan: DatasetWorkload = PLAN, feeders: int = 0) -> None:
        self.engine = Engine()
        self.violations: list[str] = []
        self.nodes: dict[str, SimFeederNode] = {}
        for number in range(feeders):
            SimFeederNode(f"feeder {number}", self.nodes).start(a_spec())
        self.dataset = SimDataset(
            plan,
            self.engine,
            stream=SeededStreams(3).stream("dataset"),
            world_sizes=(1, 2),
            report_violation=self.violations.append,
            is_reachable=lambda *_: True,
            feeder_nodes=self.nodes,
        )
        self.waits: list[float] = []

    def open(self, positions: Mapping[str, Any] = {}) -> SimShard:
        shard = self.dataset.create_shard(
            "worker", rank=0, world_size=1, resume_worker=lambda: None
        )
        shard.feeders = tuple(FeederAddress(address=address) for address in self.nodes)
        spec = FeederSpec(min_nodes=1, max_nodes=2) if self.nodes else None
        self.finish(
            shard.open(lambda: positions, spec, lambda waited_s, _: self.waits.append(waited_s))
        )
        return shard

    def finish(self, routine: Any) -> Any:
        """Run a routine of a shard to its end, in virtual time."""
        while True:
            try:
                next(routine)
            except StopIteration as ended:
                return ended.value
            # A routine is resumed when its thread has finished; asking earlier is harmless.
            self.engine.run(until=self.engine.now + 0.01)
            self.engine.schedule_after(0.01, lambda: None)

    def read(self, shard: SimShard, steps: int) -> list[RankBatch]:
        batches = []
        for _ in range(steps):
            batches.append(self.finish(shard.next_batch()))
            shard.count_step()
        return batches


def test_shard_continues_with_the_next_epoch() -> None:
    reading = Reading()
    with reading.dataset.patches():
        batches = reading.read(reading.open(), 8)
    assert [batch.epoch for batch in batches] == [0] * 4 + [1] * 4
    for epoch in (0, 1):
        numbers = [row for batch in batches if batch.epoch == epoch for row, _ in batch.rows]
        assert sorted(numbers) == list(range(48))


@pytest.mark.parametrize("counts_steps", [False, True])
def test_shard_resumes_after_the_steps_that_were_trained_on(counts_steps: bool) -> None:
    plan = DatasetWorkload(unit_rows=(48,), batch_rows=12, counts_steps=counts_steps)
    reading = Reading(plan)
    with reading.dataset.patches():
        shard = reading.open()
        [*_, third] = reading.read(shard, 2)
        positions = shard.positions()
        expected = reading.read(shard, 3)
        assert reading.read(reading.open(positions), 3) == expected
        shard.resume(positions)
        assert reading.read(shard, 3) == expected
    assert third not in expected


def test_machines_for_feeders_return_the_same_rows_also_if_one_is_lost() -> None:
    alone, fed = Reading(), Reading(feeders=2)
    with alone.dataset.patches():
        expected = alone.read(alone.open(), 8)
    with fed.dataset.patches():
        shard = fed.open()
        # The connections need some time.
        fed.engine.schedule_at(1.0, lambda: None)
        fed.engine.run(until=2.0)
        batches = fed.read(shard, 3)
        fed.nodes["feeder 1"].close(closes_connections=True)
        batches += fed.read(shard, 5)
    assert batches == expected
    assert fed.dataset.slices_of_feeders > 0
    assert not fed.violations


def test_feeders_that_raise_or_hang_are_replaced_by_the_worker() -> None:
    faults = FeederFaults(failure_probability=0.5, hang_probability=0.1)
    plan = DatasetWorkload(unit_rows=PLAN.unit_rows, batch_rows=12, augments=True, feeders=faults)
    alone, fed = Reading(), Reading(plan, feeders=2)
    with alone.dataset.patches():
        expected = alone.read(alone.open(), 8)
    with fed.dataset.patches():
        assert fed.read(fed.open(), 8) == expected


@pytest.mark.parametrize("cache", [CacheFaults(10**6), CacheFaults(500, 10**6, 0.5)], ids=str)
def test_processes_of_a_machine_read_the_rows_of_its_cache(cache: CacheFaults) -> None:
    plan = replace(PLAN, cache=cache)
    alone, cached = Reading(replace(PLAN, cache=CacheFaults(1))), Reading(plan)
    with alone.dataset.patches():
        expected = alone.read(alone.open(), 8)
    with cached.dataset.patches():
        for _ in range(3):
            assert cached.read(cached.open(), 8) == expected
    assert not cached.violations


def test_waits_for_feeders_are_reported_in_virtual_time() -> None:
    plan = DatasetWorkload(
        unit_rows=PLAN.unit_rows, batch_rows=12, augments=True, feeders=FeederFaults((2.0, 3.0))
    )
    reading = Reading(plan, feeders=1)
    with reading.dataset.patches():
        shard = reading.open()
        reading.engine.run(until=3.0)
        reading.read(shard, 8)
        reading.engine.run(until=reading.engine.now + 30.0)
        shard.close()
        reading.dataset.close()
    assert max(reading.waits) > 2.0


def test_error_of_the_reader_is_a_violation() -> None:
    reading = Reading()
    with reading.dataset.patches():
        shard = reading.open(
            {"train": {"epoch": 0, "consumed": 3, "manifest": "?", "world_size": 1}}
        )
        next(shard.next_batch())
    assert "has other rows than when the checkpoint was saved" in reading.violations[0]
