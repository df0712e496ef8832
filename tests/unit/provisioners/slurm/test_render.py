"""Rendering of array jobs, and execution of their script with fake Slurm commands."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit_provisioners.slurm.options import SlurmOptions
from spotfit_provisioners.slurm.render import batch_script, plan
from tests.unit.provisioners import golden

GOLDEN = Path(__file__).parent / "golden"


def a_request(workers: int = 4, **resources: float) -> GroupRequest:
    return GroupRequest(
        token=Token("t-0123456789ab"),
        num_workers=workers,
        total_workers=workers,
        resources_per_worker=resources,
        run_name="Digits 1",
    )


@pytest.mark.parametrize(
    ("name", "request_", "options"),
    [
        ("plain", a_request(), SlurmOptions()),
        (
            "gpus",
            a_request(8, GPU=1.0, CPU=6.0, memory=2.0**34),
            SlurmOptions(
                partitions=("spot", "short"),
                account="lab",
                qos="low",
                constraint="nvlink",
                exclude="n[3-5]",
                reservation="class",
                gres="gpu:a100",
                time="1-00:00:00",
                exclusive=True,
                workers_per_node=4,
                modules=("python/3.12", "cuda"),
                setup=("source /shared/venv/bin/activate",),
                command_prefix="apptainer exec --nv /shared/spotfit.sif",
                environment={"NCCL_DEBUG": "WARN it"},
                grace_s=90.0,
                work_dir="/shared/runs",
                extra_args=("--nice=100",),
            ),
        ),
    ],
)
def test_plan_matches_its_golden_file(
    name: str, request_: GroupRequest, options: SlurmOptions
) -> None:
    golden.check_golden(msgspec.to_builtins(plan(request_, options)), GOLDEN / f"plan_{name}.json")


def test_comment_of_the_job_has_name_and_id_of_the_run() -> None:
    arguments = plan(replace(a_request(), run_id="0123abc"), SlurmOptions()).body["arguments"]
    assert "--comment=spotfit digits-1 0123abc" in arguments


def test_memory_per_cpu_is_used_without_a_memory_request() -> None:
    arguments = plan(a_request(1, CPU=3.0), SlurmOptions(memory_per_cpu_gib=2.0)).body["arguments"]
    assert "--mem=6144M" in arguments


def test_workers_that_request_only_gpus_get_four_cpus_per_gpu() -> None:
    arguments = plan(a_request(2, GPU=1.0), SlurmOptions(workers_per_node=2)).body["arguments"]
    assert "--cpus-per-task=8" in arguments
    assert not any(argument.startswith("--mem=") for argument in arguments)


def test_memory_limit_that_would_kill_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"Slurm would kill .* memory limit of 2048 MiB"):
        plan(a_request(1, GPU=1.0, memory=2.0**31), SlurmOptions())


def test_multiline_values_are_rejected() -> None:
    with pytest.raises(ConfigError, match="line breaks"):
        plan(a_request(), SlurmOptions(command_prefix="a\nb"))


class Node:
    """A node with a shell agent and fake Slurm commands that record their calls."""

    def __init__(self, folder: Path, agent: str, state: str) -> None:
        self.requeue_calls = folder / "calls"
        programs = {
            "agent": agent,
            "squeue": f"echo {state}",
            "scontrol": f'echo "$@" > {self.requeue_calls}; kill -KILL $PPID',
        }
        for name, lines in programs.items():
            (folder / name).write_text(f"#!/bin/bash\n{lines}\n")
            (folder / name).chmod(0o755)
        self.shell = subprocess.Popen(
            ["/bin/bash", "-c", batch_script(SlurmOptions(python="agent", grace_s=7.0))],
            env={"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "41"},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self) -> str:
        """Return the output at the end of the process; kills it after a timeout."""
        try:
            result, _ = self.shell.communicate(timeout=30)
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have exited
                os.killpg(self.shell.pid, signal.SIGKILL)
            self.shell.wait()
        return result


@pytest.mark.parametrize("code", [0, 64, 70, 75])
def test_exit_code_of_the_agent_is_that_of_the_task(tmp_path: Path, code: int) -> None:
    node = Node(tmp_path, f"exit {code}", "RUNNING")
    node.end()
    assert node.shell.returncode == code
    assert not node.requeue_calls.exists()


def test_drained_machine_is_requeued(tmp_path: Path) -> None:
    node = Node(tmp_path, "exit 85", "RUNNING")
    node.end()
    assert node.shell.returncode == -signal.SIGKILL
    assert node.requeue_calls.read_text() == "requeue 41\n"


def test_cancelled_task_is_not_requeued(tmp_path: Path) -> None:
    node = Node(tmp_path, "exit 85", "COMPLETING")
    node.end()
    assert node.shell.returncode == 85
    assert not node.requeue_calls.exists()


def test_sigterm_of_the_shell_reaches_the_agent_and_its_exit_code_is_kept(tmp_path: Path) -> None:
    lines = "trap 'echo received; exit 75' TERM; echo $SPOTFIT_SIGNAL_GRACE_S"
    node = Node(tmp_path, lines + "; while :; do sleep 0.05; done", "RUNNING")
    assert node.shell.stdout is not None
    assert node.shell.stdout.readline() == "7.0\n"
    node.shell.send_signal(signal.SIGTERM)
    result = node.end()
    assert result == "received\n"
    assert node.shell.returncode == 75


def test_a_time_limit_is_the_time_of_the_job_unless_the_options_set_one() -> None:
    limited = replace(a_request(2), time_limit_s=7230)
    result = msgspec.to_builtins(plan(limited, SlurmOptions()))
    golden.check_golden(result, GOLDEN / "plan_time_limit.json")
    assert "--time=120:30" in result["body"]["arguments"]
    assert "--time=1:00:00" in plan(limited, SlurmOptions(time="1:00:00")).body["arguments"]
