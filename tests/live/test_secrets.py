"""Secrets are not in the bucket, in process arguments or in logs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.client.keyring import RunKeyring
from spotfit.core.ids import RunId
from tests.live.cloud import LiveTestCloud

Config = dict[str, Any]
PASSWORD = "a password among env_vars"
CONSTANT = "a constant in the training function"
CONFIG = "a text in the config"
RETURNED = "what the function returned"
RAISED = "what the first attempt raised"


@pytest.fixture
def cloud(cold_cloud: LiveTestCloud) -> LiveTestCloud:
    """The test reads all files of the local cloud."""
    return cold_cloud


def train(config: Config) -> str:
    marks = Path(config["marks"])
    assert os.environ["PASSWORD"] == PASSWORD
    assert CONFIG in config["text"]
    if not (marks / "raised").exists():
        (marks / "raised").touch()
        raise ValueError([RAISED])
    (marks / "at work").touch()
    while not (marks / "looked").exists():
        time.sleep(0.01)
    return f"{RETURNED} with {CONSTANT}"


def process_secrets() -> bytes:
    """Return the command lines and environments of all processes."""
    result = []
    for process in Path("/proc").iterdir():
        for file in ("cmdline", "environ") if process.name.isdecimal() else ():
            try:
                result.append((process / file).read_bytes())
            except OSError:
                continue
    return b"\n".join(result)


def in_files(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_secrets_are_readable_only_with_the_run_key(cloud: LiveTestCloud) -> None:
    handle = cloud.submit(
        train,
        config={"text": CONFIG},
        worker_runtime_env={"env_vars": {"PASSWORD": PASSWORD}},
        failure_config=spotfit.FailureConfig(max_failures=1),
    )
    cloud.wait_for_mark("at work")
    run_id = cloud.view().run_id
    key = RunKeyring().find(RunId(run_id or ""))
    assert key is not None
    secret = key.to_text().encode()
    assert secret not in process_secrets()
    machines = in_files(cloud.root.path)
    assert b"agent.started" in machines, "the output of agents is included"
    assert secret not in machines
    cloud.write_mark("looked")
    assert handle.result(60).return_value == f"{RETURNED} with {CONSTANT}"

    bucket = in_files(Path(cloud.storage))
    for text in (PASSWORD, CONSTANT, CONFIG, RETURNED):
        assert text.encode() not in bucket, text
    assert secret not in bucket
    assert bucket.count(RAISED.encode()) > 0, "the journal contains the text of the exception"
