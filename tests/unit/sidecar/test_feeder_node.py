"""ProcessFeederNode: the sidecar that starts the feeders of a machine."""

from __future__ import annotations

import pytest

from spotfit.model.spec import FeederSpec, RunSpec
from spotfit.model.topology import FeederAddress
from spotfit.protocol.agent_sidecar import FeedersListening, SidecarInit
from spotfit.sidecar.feeder_node import ProcessFeederNode
from spotfit.testing.builders import RUN_ID, a_spec
from tests.unit.sidecar.fake_process import FakeStarter

FEEDER = FeederAddress(address="10.0.0.1:4000", connections=2)


def init_of(spec: RunSpec) -> SidecarInit:
    return SidecarInit(
        storage_url=spec.storage_url, code_bundle=spec.code_bundle, secret="hush", run_id=RUN_ID
    )


def start_node(cpus: float = 2.0, processors: int = 8) -> tuple[ProcessFeederNode, FakeStarter]:
    starter = FakeStarter()
    node = ProcessFeederNode(starter.start, init_of, processors=processors)
    feeders = FeederSpec(min_nodes=1, max_nodes=1, resources={"CPU": cpus})
    node.start(a_spec(storage_url="/run", feeders=feeders, log_level="DEBUG"))
    return node, starter


@pytest.mark.parametrize(
    ("cpus", "processors", "processes"), [(2.0, 8, 2), (16.0, 8, 8), (1.5, 8, 2), (0.2, 8, 1)]
)
def test_the_sidecar_starts_a_process_for_each_requested_processor(
    cpus: float, processors: int, processes: int
) -> None:
    _, starter = start_node(cpus, processors)
    assert starter.latest.received_types == ["sidecar_init", "start_feeders"]
    assert starter.latest.received[0]["secret"] == "hush"
    assert starter.latest.received[1] == {
        "type": "start_feeders",
        "processes": processes,
        "log_level": "DEBUG",
    }


def test_the_address_is_known_once_the_feeders_listen() -> None:
    node, starter = start_node()
    assert node.is_running
    assert node.feeder is None
    starter.latest.reply(FeedersListening(feeder=FEEDER))
    assert node.feeder == FEEDER


def test_a_sidecar_that_has_exited_has_no_address_and_can_be_started_again() -> None:
    node, starter = start_node()
    starter.latest.reply(FeedersListening(feeder=FEEDER))
    starter.latest.exit()
    assert (node.is_running, node.feeder) == (False, None)
    node.start(a_spec(feeders=FeederSpec()))
    assert node.is_running
    assert len(starter.processes) == 2


def test_stopping_kills_the_sidecar() -> None:
    node, starter = start_node()
    node.stop()
    node.stop()
    assert starter.latest.killed
    assert not node.is_running
