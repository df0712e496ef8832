"""Rendering of SkyPilot tasks, and execution of their script by bash."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId, Token
from spotfit.model.group import GroupRequest
from spotfit.provision.launch import AgentLaunchSpec
from spotfit_provisioners.skypilot import render
from spotfit_provisioners.skypilot.options import SkyPilotOptions
from tests.unit.provisioners import golden

GOLDEN = Path(__file__).parent / "golden"

ALL_OPTIONS = SkyPilotOptions(
    infra=("aws/us-east-1", "gcp/us-central1"),
    infra_order="given",
    spot="preferred",
    accelerator="A100",
    workers_per_node=4,
    image="docker:example/spotfit:0.1",
    disk_gib=200,
    setup=("pip install 'spotfit[torch]'", "true"),
    python="python3",
    environment={"NCCL_DEBUG": "WARN"},
    labels={"team": "lab"},
    recovery_strategy="FAILOVER",
    endpoint="https://sky.example.com",
)


REGIONS = ("aws/us-east-1", "gcp/us-central1")


def a_request(workers: int = 4, **resources: float) -> GroupRequest:
    return GroupRequest(
        token=Token("t-0123456789ab"),
        num_workers=workers,
        total_workers=workers,
        resources_per_worker=resources,
        run_name="Digits 1",
    )


def test_machines_have_labels_of_their_run() -> None:
    request = structs.replace(a_request(1), run_id="0123abc")
    labels = render.plan(request, SkyPilotOptions(labels={"team": "lab"})).body["task"][
        "resources"
    ]["labels"]
    assert (
        labels.items()
        >= {
            "team": "lab",
            "spotfit-run": "digits-1",
            "spotfit-run-id": "0123abc",
        }.items()
    )


@pytest.mark.parametrize(
    ("name", "request_", "options"),
    [
        ("plain", a_request(1), SkyPilotOptions()),
        ("all_options", a_request(4, GPU=1.0, CPU=6.0, memory=2.0**34), ALL_OPTIONS),
        (
            "clusters",
            a_request(1, CPU=2.0),
            SkyPilotOptions(launch_mode="clusters", infra=("aws", "azure"), spot="never"),
        ),
        (
            "several_machines",
            a_request(2, CPU=2.0),
            SkyPilotOptions(infra=REGIONS, spot="preferred"),
        ),
        ("instance_type", a_request(1, GPU=8.0), SkyPilotOptions(instance_type="p4d.24xlarge")),
        # The usual line of Ray: ScalingConfig(num_workers=2, use_gpu=True).
        (
            "gpus_only",
            a_request(2, GPU=1.0),
            SkyPilotOptions(accelerator="L4", infra=("aws/us-east-1",)),
        ),
    ],
)
def test_plan_matches_its_golden_file(
    name: str, request_: GroupRequest, options: SkyPilotOptions
) -> None:
    result = msgspec.to_builtins(render.plan(request_, options))
    golden.check_golden(result, GOLDEN / f"plan_{name}.json")


def render_task(options: SkyPilotOptions) -> dict[str, Any]:
    launch = AgentLaunchSpec(
        "s3://b/run", RunId("r-1"), "the secret itself", storage_credentials="keys"
    )
    plan = render.plan(a_request(2), replace(options, infra=REGIONS))
    return render.task_request(plan, 1, launch.environment_for(plan.token, 1, plan.slots_per_node))


def test_run_key_is_declared_as_a_secret() -> None:
    task = render_task(SkyPilotOptions())
    assert task["secrets"] == {
        "SPOTFIT_RUN_SECRET": "the secret itself",
        "SPOTFIT_STORAGE_KEYS": "keys",
    }
    assert task["envs"]["SPOTFIT_NODE"] == "1"
    assert "the secret itself" not in str({**task, "secrets": {}})


def test_machines_do_not_start_an_api_server() -> None:
    envs = render_task(SkyPilotOptions())["envs"]
    assert envs[render.NO_LOCAL_SERVER_VARIABLE] == "1"
    assert render.ENDPOINT_VARIABLE not in envs
    remote = render_task(SkyPilotOptions(endpoint="https://sky"))["envs"]
    assert remote[render.ENDPOINT_VARIABLE] == "https://sky"


def infra_of(request: GroupRequest, *infra: str) -> list[str]:
    """Return the infrastructure in which the machines of the request may be placed."""
    task = render.plan(request, SkyPilotOptions(infra=infra, spot="preferred")).body["task"]
    resources = task["resources"]
    return [one["infra"] for one in resources.get("any_of", [resources])]


def test_machines_of_a_run_are_placed_in_one_region() -> None:
    assert infra_of(a_request(1), *REGIONS) == [*REGIONS, *REGIONS]
    assert set(infra_of(a_request(2), *REGIONS)) == {"aws/us-east-1"}


def test_replacement_is_placed_in_the_region_of_the_standing_machines() -> None:
    request = structs.replace(a_request(2), network="gcp/us-central1")
    assert set(infra_of(request, *REGIONS)) == {"gcp/us-central1"}


def test_a_single_machine_for_the_run_is_placed_in_its_region() -> None:
    """As those for feeders and validations: they connect to the machines of the workers."""
    request = structs.replace(a_request(1), network="gcp/us-central1")
    assert set(infra_of(request, *REGIONS)) == {"gcp/us-central1"}


@pytest.mark.parametrize(
    ("refused", "chosen"),
    [
        (("aws/us-east-1",), "gcp/us-central1"),
        (("aws/us-east-1", "gcp/us-central1"), "aws/us-east-1"),
        (("gcp/us-central1", "aws/us-east-1"), "gcp/us-central1"),
    ],
)
def test_region_without_capacity_is_tried_again_last(refused: tuple[str, ...], chosen: str) -> None:
    request = structs.replace(a_request(2), refused_networks=refused)
    assert set(infra_of(request, *REGIONS)) == {chosen}


@pytest.mark.parametrize("infra", [(), ("aws",), ("slurm", "gcp")])
def test_machines_that_could_be_placed_in_several_regions_are_rejected(
    infra: tuple[str, ...],
) -> None:
    with pytest.raises(ConfigError, match="cannot connect to each other"):
        infra_of(a_request(2), *infra)


def test_infrastructure_without_regions_is_one_network() -> None:
    assert set(infra_of(a_request(2), "k8s")) == {"k8s"}


def test_gpus_without_an_accelerator_are_rejected() -> None:
    with pytest.raises(ConfigError, match="GPU type") as error_info:
        render.plan(a_request(1, GPU=1.0), SkyPilotOptions())
    assert "accelerator=" in error_info.value.do


@pytest.mark.parametrize(
    "name", ["plain", "all_options", "clusters", "several_machines", "instance_type"]
)
def test_skypilot_parses_the_task(name: str) -> None:
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed; `make sky-api`")
    body = msgspec.json.decode((GOLDEN / f"plan_{name}.json").read_bytes())["body"]["task"]
    task = sky.Task.from_yaml_config({**body, "name": "t-1-0", "secrets": {"A": "x"}})
    assert task.num_nodes == 1
    assert all(
        one.use_spot != (name == "clusters") or name in ("all_options", "several_machines")
        for one in task.resources
    )
    if name == "all_options":
        assert [str(one.cloud) for one in task.resources] == ["AWS", "GCP", "AWS", "GCP"]


def run(options: SkyPilotOptions, folder: Path, agent: str) -> tuple[int, str]:
    """Run the script with a shell agent; return its exit code and output."""
    (folder / "python").write_text(f"#!/bin/bash\n{agent}\n")
    (folder / "python").chmod(0o755)
    script = render.plan(a_request(1), options).body["task"]["run"]
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SPOTFIT_TOKEN": f"t-{folder.name}",
        "SPOTFIT_NODE": "0",
        "TMPDIR": str(folder),
    }
    done = subprocess.run(
        ["/bin/bash", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (64, 64), (70, 70), (75, 0), (85, 85)])
def test_exit_code_of_the_task_follows_that_of_the_agent(
    tmp_path: Path, code: int, expected: int
) -> None:
    assert run(SkyPilotOptions(), tmp_path, f"exit {code}") == (expected, "")


def test_cluster_launched_twice_has_one_agent(tmp_path: Path) -> None:
    options = SkyPilotOptions(launch_mode="clusters")
    assert run(options, tmp_path, "echo agent; exit 70") == (70, "agent\n")
    assert run(options, tmp_path, "echo agent; exit 70") == (0, "")


def test_a_time_limit_ends_the_agent_of_the_task() -> None:
    """SkyPilot itself limits only the idle time of a machine."""
    limited = structs.replace(a_request(2), time_limit_s=7200)
    result = msgspec.to_builtins(render.plan(limited, SkyPilotOptions(infra=("aws/us-east-1",))))
    golden.check_golden(result, GOLDEN / "plan_time_limit.json")
    assert "timeout --kill-after=60 7200 python" in result["body"]["task"]["run"]
