"""Plans of infra/terraform/stacks/aws for accounts with and without GPUs, with mocked AWS."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.house.hcl import NEEDS_TERRAFORM, TERRAFORM, skip_without_provider

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    NEEDS_TERRAFORM,
    pytest.mark.real_time("terraform is a separate program"),
]

# Generated values that the provider checks although AWS is mocked.
MOCKS = """
mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }
  mock_data "aws_region" {
    defaults = { id = "eu-west-1" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_subnets" {
    defaults = { ids = ["subnet-1"] }
  }
  mock_data "aws_route_tables" {
    defaults = { ids = ["rtb-1"] }
  }
}

variables {
  region             = "eu-west-1"
  bucket             = "runs"
  vpc_id             = "vpc-1"
  subnet_ids         = ["subnet-1"]
  storage_policy_arn = "arn:aws:iam::123456789012:policy/runs"
}
"""

RUNS = """
run "account_without_gpus" {
  command = plan

  assert {
    condition     = output.aws_batch.log_group == "/spotfit/spotfit"
    error_message = "the profile does not name the log group"
  }
}

run "account_with_gpus" {
  command = plan

  variables {
    image_kind        = "cuda"
    instance_types    = ["g5", "g6e", "p4d.24xlarge", "p5"]
    efa_interfaces    = 4
    s3_endpoint       = true
    tags              = { team = "vision" }
  }

  assert {
    condition     = output.aws_batch.efa_devices == 4
    error_message = "the profile does not pass the adapters to containers"
  }
  assert {
    condition     = length(aws_vpc_endpoint.s3) == 1
    error_message = "no endpoint"
  }
}

run "machines_for_rdma_and_limits_on_what_is_kept" {
  command = plan
  module {
    source = "../../modules/aws_batch"
  }
  variables {
    image_kind     = "cuda"
    instance_types = ["p4d.24xlarge"]
    efa_interfaces = 4
    tags           = { team = "vision" }
  }

  assert {
    condition = [
      for one in aws_launch_template.machine.network_interfaces : one.interface_type
    ] == ["efa", "efa", "efa", "efa"]
    error_message = "the machines have no EFA interfaces"
  }
  assert {
    condition     = aws_placement_group.cluster[0].strategy == "cluster"
    error_message = "the machines are in no placement group"
  }
  assert {
    condition     = aws_batch_compute_environment.spot.compute_resources[0].tags.team == "vision"
    error_message = "the machines do not have the tags for costs"
  }
  assert {
    condition     = aws_cloudwatch_log_group.jobs.retention_in_days == 30
    error_message = "logs are kept without end"
  }
  assert {
    condition = [
      for rule in jsondecode(aws_ecr_lifecycle_policy.worker.policy).rules : rule.action.type
    ] == ["expire", "expire"]
    error_message = "images are kept without end"
  }
}

run "cuda_image_on_cpu_families" {
  command         = plan
  expect_failures = [aws_batch_compute_environment.spot]
  module {
    source = "../../modules/aws_batch"
  }
  variables {
    image_kind = "cuda"
  }
}

run "gpus_that_cuda_13_does_not_support" {
  command         = plan
  expect_failures = [aws_batch_compute_environment.spot]
  module {
    source = "../../modules/aws_batch"
  }
  variables {
    image_kind     = "cuda"
    instance_types = ["p3"]
  }
}

run "arm_processors" {
  command         = plan
  expect_failures = [aws_batch_compute_environment.spot]
  module {
    source = "../../modules/aws_batch"
  }
  variables {
    instance_types = ["c7g"]
  }
}
"""


def test_plans_of_accounts_with_and_without_gpus(tmp_path: Path) -> None:
    copy = tmp_path / "terraform"
    shutil.copytree(TERRAFORM, copy, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
    stack = copy / "stacks" / "aws"
    (stack / "plans.tftest.hcl").write_text(MOCKS + RUNS)
    skip_without_provider(_terraform(stack, "init", "-no-color", "-backend=false", "-input=false"))
    done = _terraform(stack, "test", "-no-color")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "6 passed, 0 failed" in done.stdout


def _terraform(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["terraform", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
