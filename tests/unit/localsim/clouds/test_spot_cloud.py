"""The cloud for users' tests: planned preemptions happen once, at their step, on their rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotfit.client.request import load_callbacks_from_env
from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.host import system
from spotfit.model.group import GroupPlan
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.testing.provisioner_suite import SECRET
from spotfit.worker import training_api
from spotfit_localsim.clouds.provisioner import SimProvisioner
from spotfit_localsim.clouds.spot_cloud import ReclaimCallback, ReclaimPlan, SpotCloud
from tests.live.cloud import eventually

pytestmark = pytest.mark.real_time("a simulated cloud runs in real time")


@dataclass
class Worker:
    """The part of a session that a planned preemption uses."""

    rank: int
    host: str = ""
    reported: list[Any] = field(default_factory=list)

    @property
    def context(self) -> Any:
        return SimpleNamespace(get_world_rank=lambda: self.rank)

    def report_metrics(self, metrics: dict[str, Any], *_: Any) -> None:
        self.reported.append(metrics)

    def report_checkpoint(self, metrics: dict[str, Any], *_: Any) -> None:
        self.reported.append(metrics)

    def wait_for_preemption(self, timeout_s: float) -> bool:
        return timeout_s > 0


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpotCloud]:
    cloud = SpotCloud(tmp_path, nodes=2, notice_s=60.0)
    for name, text in cloud.environment().items():
        monkeypatch.setenv(name, text)
    yield cloud
    cloud.close()


@pytest.fixture
def launch(tmp_path: Path) -> AgentLaunchSpec:
    return AgentLaunchSpec(str(tmp_path / "run"), system.new_run_id(), SECRET)


def reclaim_callback() -> ReclaimCallback:
    """The callback that `fit()` loads from the environment."""
    (found,) = load_callbacks_from_env()
    assert isinstance(found, ReclaimCallback)
    return found


def start_machine(cloud: SpotCloud, launch: AgentLaunchSpec) -> str:
    """Submit a group of one machine, and return the machine's address once its agent runs."""
    cloud.provider.submit(
        GroupPlan(token=Token("t-1"), provisioner="plain", num_nodes=1, slots_per_node=1), launch
    )
    # A notice would end a process that does not handle signals yet.
    outputs = Path(cloud.provider.root) / "machines"
    eventually(
        lambda: any("agent.started" in one.read_text() for one in outputs.glob("*/output")),
    )
    return str(cloud.machines()[0]["address"])


def test_environment_variables_select_the_simulated_cloud(cloud: SpotCloud) -> None:
    assert cloud.provisioner.startswith("sim://plain?")
    assert "notice_s=60.0" in cloud.provisioner
    assert cloud.environment()["SPOTFIT_PROVISIONER"] == cloud.provisioner
    assert (
        cloud.provider.start_simulator()
        == SimProvisioner.with_options(root=str(cloud.provider.root)).start_simulator()
    )


def test_callbacks_in_the_environment_are_kept(
    cloud: SpotCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_CALLBACKS", "a.B")
    assert cloud.environment()["SPOTFIT_CALLBACKS"].startswith("a.B,spotfit_localsim.")


def test_planned_reclaim_waits_for_its_step_and_rank(cloud: SpotCloud) -> None:
    cloud.reclaim_at(step=3, rank=1)
    for worker, steps in ((Worker(rank=0), range(5)), (Worker(rank=1), range(3))):
        with training_api.use_session(worker), reclaim_callback().train_func_context():  # type: ignore[arg-type]
            for step in steps:
                worker.report_metrics({"step": step})
        assert len(worker.reported) == len(steps)
    assert cloud.unreached_plans() == [ReclaimPlan(step=3, rank=1, notice=True)]
    assert cloud.reclaimed_count == 0


def test_machine_of_the_rank_is_notified_once_at_its_step(
    cloud: SpotCloud, launch: AgentLaunchSpec
) -> None:
    cloud.reclaim_at(step=2)
    worker = Worker(rank=0, host=start_machine(cloud, launch))
    with training_api.use_session(worker), reclaim_callback().train_func_context():  # type: ignore[arg-type]
        for _ in range(4):
            worker.report_checkpoint({"loss": 1.0})
    assert cloud.unreached_plans() == []
    assert cloud.reclaimed_count == 1
    assert cloud.billed_machine_count == 1, "its notice period has not ended"


def test_reports_with_and_without_files_count_as_steps(
    cloud: SpotCloud, launch: AgentLaunchSpec
) -> None:
    cloud.reclaim_at(step=4)
    worker = Worker(rank=0, host=start_machine(cloud, launch))
    with training_api.use_session(worker), reclaim_callback().train_func_context():  # type: ignore[arg-type]
        for _ in range(2):
            worker.report_metrics({"loss": 1.0})
            worker.report_checkpoint({"loss": 1.0})
    assert cloud.unreached_plans() == []


def test_negative_steps_and_ranks_are_rejected(cloud: SpotCloud) -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        cloud.reclaim_at(step=-1)
    with pytest.raises(ConfigError, match="at least 0"):
        cloud.reclaim_at(step=1, rank=-1)


def test_machines_are_preempted_and_requests_fail_on_demand(
    cloud: SpotCloud, launch: AgentLaunchSpec
) -> None:
    start_machine(cloud, launch)
    cloud.reclaim(machine=1, notice=False)
    assert (cloud.reclaimed_count, cloud.billed_machine_count) == (1, 0)
    cloud.fail_requests("throttled")
    cloud.set_capacity(0)
    cloud.set_on_demand_capacity(0)
    assert [one["end_reason"] for one in cloud.machines()] == ["reclaimed"]
