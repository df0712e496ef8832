"""Simulated clouds, whose default retries are ten, with machines on which no agent starts."""

from __future__ import annotations

from pathlib import Path

import pytest

import spotfit
from spotfit_localsim.clouds.provisioner import SimProvisioner
from tests.live.cloud import eventually

# Only machines have this variable.
_BROKEN_IMAGE = """
import os, sys
if "SPOTFIT_DEVICES" in os.environ:
    sys.stderr.write("libcudart.so.13: cannot open shared object file\\n")
    sys.stderr.flush()
    os._exit(127)
"""

pytestmark = pytest.mark.real_time("machines boot and end")


def train() -> None:
    raise AssertionError("no machine starts it")


@pytest.mark.parametrize("name", ["aws_batch", "azure_batch", "gcp_batch", "kubernetes"])
def test_machines_that_start_no_agent_end_the_run_in_spite_of_the_retries_of_the_cloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_BROKEN_IMAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    sim = SimProvisioner.with_options(cloud=name, root=str(tmp_path / "cloud"), boot_s=0.1)
    sim.start_simulator()
    try:
        with pytest.raises(spotfit.ControllerError) as raised:
            spotfit.DataParallelTrainer(
                train,
                scaling_config=spotfit.ScalingConfig(num_workers=2),
                run_config=spotfit.RunConfig(storage_path=str(tmp_path / "runs"), name="run"),
                provisioner=f"sim://{name}?root={sim.root}",
            ).fit()
        # The logs of AWS and Google arrive later than the end of the machine.
        shows_output = "libcudart.so.13" in str(raised.value)
        assert shows_output or "spotfit logs --machine" in str(raised.value)
        # Two machines for each of three failed starts, and none by retries of the cloud.
        assert len(sim.call_simulator("machines")) == 6
        eventually(lambda: all(m["state"] == "over" for m in sim.call_simulator("machines")))
    finally:
        sim.call_simulator("leave", {"machines": True})
