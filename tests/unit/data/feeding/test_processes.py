"""Feeder processes as their parent sees them."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import cloudpickle
import pyarrow as pa
import pytest

from spotfit.data.feeding import processes
from spotfit.data.feeding.feeder_process import FeederInit
from spotfit.data.feeding.link import FeederLink
from spotfit.data.feeding.messages import SliceReply
from spotfit.data.feeding.processes import FeederProcess
from spotfit.data.plans.transforms import BlockFunction
from tests.unit.data.feeding.augmented_rows import Pass, RaiseAt, dataset_of, shipped

pytestmark = pytest.mark.real_time("starts processes")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
)


class ReportEnvironment:
    name = identity = "map_batches(report_environment)"
    runs_user_code = True

    def bind(self) -> BlockFunction:
        return self._report

    def _report(self, block: pa.Table) -> pa.Table:
        for name in VARIABLES:
            block = block.append_column(name, pa.array([os.environ.get(name)] * len(block)))
        return block


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[FeederProcess]:
    for name in VARIABLES:
        monkeypatch.setenv(name, "3")
    started = FeederProcess(FeederInit(), cloudpickle.dumps(shipped(DATASET)))
    yield started
    started.close()


DATASET = dataset_of(12, ReportEnvironment())


def first_slice(link: FeederLink) -> pa.Table:
    link.send(1, next(Pass(DATASET).tasks()))
    reply = link.receive()
    link.close()
    assert isinstance(reply, SliceReply), reply
    return reply.table


def test_a_process_sees_no_accelerators_and_uses_one_thread(process: FeederProcess) -> None:
    table = first_slice(FeederLink(process.connect(), "feeder"))
    assert [table.column(name)[0].as_py() for name in VARIABLES] == ["", "1", "1", "1"]


def test_processes_share_the_cache_of_the_run(tmp_path: Path) -> None:
    dataset = DATASET.cache(disk_bytes=2**20).with_transform(RaiseAt(99))
    one_pass = Pass(dataset)
    init = FeederInit(scratch_dir=str(tmp_path))
    with closing(FeederProcess(init, cloudpickle.dumps(shipped(dataset)))) as process:
        link = FeederLink(process.connect(), "feeder")
        link.send(1, next(one_pass.tasks()))
        assert isinstance(link.receive(), SliceReply)
        link.close()
    assert len(list(tmp_path.glob("data_cache/*/*/*-all"))) == 1


def test_a_process_serves_several_connections(process: FeederProcess) -> None:
    links = [FeederLink(process.connect(), "feeder") for _ in range(2)]
    assert first_slice(links[0]) == first_slice(links[1])


def test_a_killed_process_is_not_running_and_names_its_exit(process: FeederProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == "exit code -9"
    assert not process.is_running
    with pytest.raises(OSError, match=r"Broken pipe|Connection reset"):
        process.connect()


def test_a_process_that_hangs_is_killed(
    process: FeederProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_EXIT_TIMEOUT_S", 0.0)
    os.kill(process.pid, signal.SIGSTOP)
    assert process.wait().startswith("killed")
    assert not process.is_running


def test_a_closed_process_has_ended(process: FeederProcess) -> None:
    process.close()
    process.close()
    assert not process.is_running


def test_a_process_that_cannot_be_started_leaves_no_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs: list[socket.socket] = []

    def recorded_pair() -> tuple[socket.socket, socket.socket]:
        pairs.extend(pair := make_pair())
        return pair

    make_pair = socket.socketpair
    monkeypatch.setattr(socket, "socketpair", recorded_pair)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(FileNotFoundError):
        FeederProcess(FeederInit(), b"")
    assert [sock.fileno() for sock in pairs] == [-1, -1]
