"""Translation of Slurm's errors, and the arguments of its commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfit.core.errors import (
    InfrastructureError,
    ProvisionError,
    ProvisionPermissionError,
    QuotaError,
    SpotfitError,
)
from spotfit_provisioners.slurm.client import SlurmClient, to_provision_error
from spotfit_provisioners.slurm.states import SlurmTask

SUBMISSION = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("Unable to contact slurm controller (connect failure)", InfrastructureError),
        ("Socket timed out on send/recv operation", InfrastructureError),
        ("Slurm temporarily unable to accept job, sleeping and retrying", InfrastructureError),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            QuotaError,
        ),
        ("Requested time limit is invalid (missing or exceeds some limit)", QuotaError),
        (
            "Invalid account or account/partition combination specified",
            ProvisionPermissionError,
        ),
        ("User's group not permitted to use this partition", ProvisionPermissionError),
        ("Access/permission denied", ProvisionPermissionError),
        ("Invalid partition name specified", ProvisionError),
        ("Requested node configuration is not available", ProvisionError),
        ("Invalid generic resource (gres) specification", ProvisionError),
    ],
)
def test_permanent_errors_are_distinguished(message: str, error: type[SpotfitError]) -> None:
    result = to_provision_error("sbatch", SUBMISSION + message)
    assert type(result) is error
    assert message in str(result)


@pytest.fixture
def bin_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fake Slurm commands that record their arguments."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def command(folder: Path, name: str, *lines: str) -> None:
    path = folder / name
    head = f'#!/bin/sh\necho "$@" > {folder}/words; env > {folder}/env; cat > {folder}/script'
    path.write_text("\n".join((head, *lines)) + "\n")
    path.chmod(0o755)


def test_secret_is_in_the_environment_and_not_in_the_command(
    bin_: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the caller")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    command(bin_, "sbatch", "echo '41;cluster'")
    secret = {"SPOTFIT_RUN_SECRET": "the secret itself"}
    assert SlurmClient().submit_held(["--array=0-1"], "#!/bin/bash\n", secret) == 41
    assert "the secret itself" not in (bin_ / "words").read_text()
    assert (bin_ / "script").read_text() == "#!/bin/bash\n"
    result = (bin_ / "env").read_text()
    assert "SPOTFIT_RUN_SECRET=the secret itself" in result
    assert "of the caller" not in result
    assert "SLURM_JOB_ID" not in result


def test_unknown_job_has_no_tasks_and_can_be_cancelled(bin_: Path) -> None:
    for name in ("squeue", "scancel"):
        command(bin_, name, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert SlurmClient().list_job_tasks("99") == []
    SlurmClient().cancel("99")


def test_tasks_are_parsed(bin_: Path) -> None:
    command(bin_, "squeue", "echo '41|0|RUNNING|None|0|1795693260|1795693560|'")
    assert SlurmClient().list_tasks_by_name("t-1") == [
        SlurmTask(41, 0, "RUNNING", "None", 0, 1795693260000, 1795693560000)
    ]
    # Without it, squeue prints the local time of this machine.
    assert "SLURM_TIME_FORMAT=%s" in (bin_ / "env").read_text()


def test_settings_are_parsed(bin_: Path) -> None:
    command(bin_, "scontrol", "echo 'Configuration data'; echo 'KillWait    = 30 sec'")
    assert SlurmClient().read_cluster_config() == {"KillWait": "30 sec"}


def test_missing_slurm_commands_name_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProvisionError, match="command sbatch") as error_info:
        SlurmClient().submit_held([], "", {})
    assert "login node" in error_info.value.do
