"""A hanging or failing bucket: training continues, and saves are uploaded later."""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.client.trainer import TorchTrainer
from spotfit.model.events import CheckpointCommitted, LeaderElected, RoundClosed, RoundOpened
from spotfit.security.object_mac import strip_mac
from spotfit.store.factory import open_store
from spotfit_localsim.live import network_faults
from spotfit_localsim.live.chaos_runs import faulty_store_proxy
from tests.live.cloud import LiveTestCloud, eventually

STALL_S = 12.0
"""Longer than the request timeout and the agents' timeout."""


@pytest.fixture
def store_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an S3 server with one bucket, which tests can suspend."""
    with faulty_store_proxy() as address:
        for name, text in (
            ("AWS_ENDPOINT_URL", address),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, text)
        request = urllib.request.Request(f"{address}/runs", method="PUT")  # noqa: S310 - loopback
        urllib.request.urlopen(request).close()  # noqa: S310 - loopback
        yield address


def train(config: dict[str, Any]) -> int:
    """Execute synchronized steps, and save when the test writes a mark."""
    marks, rank = Path(config["marks"]), spotfit.get_context().get_world_rank()
    step = 0
    while True:
        step += 1
        requests = [mark for mark in ("save", "enough") if (marks / mark).exists()]
        requests = spotfit.collective.broadcast_from_rank_zero(requests)
        spotfit.report({"step": step})
        if rank == 0:
            write_mark(marks / "step", str(step))
        if "save" in requests and not (marks / f"saved-{rank}").exists():
            save(step)
            (marks / f"saved-{rank}").touch()
        if "enough" in requests:
            save(step)
            return step
        time.sleep(0.02)


def write_mark(mark: Path, text: str) -> None:
    """Write the mark atomically."""
    temporary = mark.with_suffix(".draft")
    temporary.write_text(text)
    temporary.rename(mark)


def save(step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"rank{spotfit.get_context().get_world_rank()}").write_text(json.dumps(step))
        checkpoint = spotfit.Checkpoint.from_directory(folder)
        spotfit.report({"step": step}, checkpoint=checkpoint)


def last_step(cloud: LiveTestCloud) -> int:
    return int(cloud.wait_for_mark("step").read_text())


def train_on(config: dict[str, Any]) -> int:
    """Execute synchronized steps, and save once when the test writes a mark. Each attempt records
    the step from which it resumed."""
    import torch

    marks, rank = Path(config["marks"]), spotfit.get_context().get_world_rank()
    ckpt = spotfit.torch.Checkpointer(model=torch.nn.Linear(2, 2), every="at_notice")
    restored = ckpt.restore()
    attempt = "later" if (marks / f"first-{rank}").exists() else "first"
    write_mark(marks / f"{attempt}-{rank}", str(restored.step if restored else 0))
    while True:
        requests = [mark for mark in ("save", "enough") if (marks / mark).exists()]
        requests = spotfit.collective.broadcast_from_rank_zero(requests)
        if "enough" in requests:
            return ckpt.steps
        time.sleep(0.02)
        ckpt.step()
        if "save" in requests and not restored and not (marks / f"saved-{rank}").exists():
            ckpt.save()
            write_mark(marks / f"saved-{rank}", str(ckpt.steps))


def test_change_of_machines_does_not_wait_for_a_pending_upload(
    cloud: LiveTestCloud, store_url: str
) -> None:
    """The upload does not complete before the change; a peer has a later snapshot."""
    cloud.storage = f"s3://runs/{cloud.folder.name}"  # a process has one client per endpoint
    how: dict[str, Any] = {"trainer_type": TorchTrainer, "storage": cloud.storage}
    handle = cloud.submit(train_on, workers=2, nodes=2, **how)
    cloud.wait_for_mark("first-0")
    network_faults.hold_writes(store_url, "chunks")
    cloud.write_mark("save")
    saved = [int(cloud.wait_for_mark(f"saved-{rank}").read_text()) for rank in (0, 1)]
    cloud.reclaimer.notify(cloud.node_of_rank(1), seconds_left=180.0)
    eventually(lambda: (cloud.marks / "later-0").exists(), within_s=90.0)
    network_faults.hold_writes(store_url, "")
    assert int(cloud.wait_for_mark("later-0").read_text()) > saved[0]
    until_changed = [type(event) for event in cloud.events()]
    until_changed = until_changed[: until_changed.index(RoundClosed)]
    assert CheckpointCommitted not in until_changed
    cloud.write_mark("enough")
    assert handle.result(60.0).return_value > saved[0]


@pytest.mark.real_time("a stall must be longer than the timeouts of sockets and heartbeats")
def test_training_continues_while_the_bucket_hangs(cloud: LiveTestCloud, store_url: str) -> None:
    cloud.storage = f"s3://runs/{cloud.folder.name}"  # a process has one client per endpoint
    handle = cloud.submit(train, workers=2, nodes=2, storage=cloud.storage)
    cloud.wait_for_mark("step")
    network_faults.start_stall(store_url, STALL_S)
    hangs_until = time.monotonic() + STALL_S
    before = last_step(cloud)
    eventually(lambda: time.monotonic() > hangs_until - 3.0)
    assert last_step(cloud) > before + 50, "training waited for the bucket"
    cloud.write_mark("save")
    cloud.wait_for_mark("saved-0")
    assert time.monotonic() > hangs_until
    cloud.write_mark("enough")
    result = handle.result(60.0)
    events = cloud.events()
    kinds = [type(event) for event in events]
    assert (kinds.count(RoundOpened), kinds.count(RoundClosed)) == (1, 0)
    assert kinds.count(LeaderElected) == 2, "the driver, and the agent that took over from it"
    committed = [event for event in events if isinstance(event, CheckpointCommitted)]
    assert [one.metrics["step"] for one in committed][-1] == result.return_value
    assert len(committed) == 2
    assert stored_reports(cloud) == list(range(len(stored_reports(cloud)))), (
        "every report once, in order"
    )
    assert len(stored_reports(cloud)) == result.return_value + 2


def save_while_it_refuses(config: dict[str, Any]) -> str:
    """Report files asynchronously, then save a snapshot, while the bucket rejects requests."""
    import torch

    marks = Path(config["marks"])
    ckpt = spotfit.torch.Checkpointer(model=torch.nn.Linear(2, 2), every="at_notice")
    ckpt.restore()
    (marks / "ready").touch()
    while not (marks / "refuses").exists():
        time.sleep(0.02)
    folder = Path(tempfile.mkdtemp())
    (folder / "mine").write_text("kept")
    spotfit.report(
        {"loss": 0.5},
        checkpoint=spotfit.Checkpoint.from_directory(folder),
        checkpoint_upload_mode=spotfit.CheckpointUploadMode.ASYNC,
    )
    ckpt.step()
    ckpt.save()
    (marks / "saved").touch()
    return "all is given away"


def test_uploads_complete_after_the_bucket_recovers(cloud: LiveTestCloud, store_url: str) -> None:
    cloud.storage = f"s3://runs/{cloud.folder.name}"  # a process has one client per endpoint
    handle = cloud.submit(save_while_it_refuses, trainer_type=TorchTrainer, storage=cloud.storage)
    cloud.wait_for_mark("ready")
    network_faults.set_faults(store_url, network_faults.NetworkFaults(refusal_probability=1.0))
    before = network_faults.fetch_request_counts(store_url)["PUT"]
    cloud.write_mark("refuses")
    cloud.wait_for_mark("saved")
    eventually(
        lambda: network_faults.fetch_request_counts(store_url)["PUT"] > before + 60, within_s=180.0
    )
    network_faults.set_faults(store_url, network_faults.no_faults())
    result = handle.result(120.0)
    assert result.return_value == "all is given away"
    committed = [event for event in cloud.events() if isinstance(event, CheckpointCommitted)]
    assert [(one.is_snapshot, one.metrics) for one in committed] == [
        (False, {"loss": 0.5}),
        (True, {}),
    ]


def stored_reports(cloud: LiveTestCloud) -> list[int]:
    """Return the indices of all reports in the bucket."""
    store = open_store(cloud.url())
    chunks = [strip_mac(store.get(found.key)) for found in store.list(".spotfit/reports")]
    return [json.loads(line)["report_index"] for chunk in chunks for line in chunk.splitlines()]
