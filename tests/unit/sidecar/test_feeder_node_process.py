"""The feeder sidecar: loads the code bundle and serves datasets with the run key."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from spotfit.code.code_bundle import DATASETS, upload_code_bundle
from spotfit.code.runtime_env import RuntimeEnv
from spotfit.data.feeding.feeder_process import FeederInit
from spotfit.data.feeding.feeder_server import FeederServer
from spotfit.data.feeding.pool import FeederPool
from spotfit.data.feeding.remote_feeders import RemoteFeeders
from spotfit.host import env
from spotfit.host.system import SystemClock
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.model.topology import FeederAddress
from spotfit.protocol.agent_sidecar import SidecarInit, StartFeeders, ToFeederNode
from spotfit.security.run_key import RunKey, make_tls_contexts
from spotfit.sidecar import feeder_node_process
from spotfit.sidecar.feeder_node_process import open_server, serve_for_agent
from spotfit.sidecar.process_setup import SidecarConnection
from spotfit.store.factory import open_store
from spotfit.testing.builders import RUN_ID
from tests.unit.data.feeding.augmented_rows import Pass, dataset_of, shipped
from tests.unit.data.feeding.test_local_feeders import execute_nothing, wait_until

pytestmark = pytest.mark.real_time("starts processes")
KEY = RunKey(b"k" * 32, RUN_ID)


@pytest.fixture(autouse=True)
def restore_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restore what activating the code bundle changes."""
    monkeypatch.chdir(tmp_path)
    # The processes that are started import the datasets from here.
    root = Path(__file__).parents[3]
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])
    monkeypatch.setenv(env.HOST.name, "127.0.0.1")


class UnableServer(FeederServer):
    """Cannot start its processes again."""

    def serve(self) -> None:
        raise BlockingIOError("no memory for a process")


@pytest.fixture
def agent_and_sidecar() -> Iterator[tuple[socket.socket, SidecarConnection[ToFeederNode]]]:
    agent, end = socket.socketpair()
    sidecar = SidecarConnection[ToFeederNode](end.detach(), feeder_node_process._message_decoder)
    yield agent, sidecar
    agent.close()
    for thread in threading.enumerate():
        if thread.name == "spotfit-feeder-agent":
            thread.join()
    sidecar._socket.close()


def test_processes_end_when_the_agent_closes_the_socket(
    agent_and_sidecar: tuple[socket.socket, SidecarConnection[ToFeederNode]],
) -> None:
    agent, sidecar = agent_and_sidecar
    server = FeederServer(FeederInit(), b"", processes=1)
    pids = server.pids
    agent.close()
    serve_for_agent(server, sidecar)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_server_that_cannot_start_processes_ends_the_sidecar(
    agent_and_sidecar: tuple[socket.socket, SidecarConnection[ToFeederNode]],
) -> None:
    server = UnableServer(FeederInit(), b"", processes=1)
    pids = server.pids
    with pytest.raises(BlockingIOError):
        serve_for_agent(server, agent_and_sidecar[1])
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_workers_with_the_run_key_get_slices_of_the_packed_datasets(tmp_path: Path) -> None:
    store = AuthenticatedStore(open_store(str(tmp_path / "run")), KEY)
    dataset = dataset_of(60)
    reference = upload_code_bundle(
        lambda: None,
        None,
        runtime_env=RuntimeEnv(),
        key=KEY,
        store=store,
        objects={DATASETS: shipped(dataset)},
    )
    init = SidecarInit(
        storage_url=store.url,
        code_bundle=msgspec.to_builtins(reference),
        secret=KEY.to_text(),
        run_id=RUN_ID,
        scratch_dir=str(tmp_path),
    )
    server = open_server(init, StartFeeders(processes=1))
    threading.Thread(target=server.serve, daemon=True).start()
    pool = FeederPool(execute_nothing, SystemClock())
    remote = RemoteFeeders(pool, make_tls_contexts(KEY.to_text(), RUN_ID).client)
    try:
        remote.set_addresses([FeederAddress(address=server.address)])
        wait_until(lambda: pool.feeder_count == 1)
        one_pass = Pass(dataset)
        slices = [pool.request(task) for task in one_pass.tasks()]
        assert [pool.take(one) for one in slices] == one_pass.expected
    finally:
        pool.close()
        remote.close()
        server.close()
