# A job queue of spot machines on AWS Batch, with minimal permissions.

data "aws_region" "here" {}
data "aws_caller_identity" "here" {}
data "aws_partition" "here" {}

locals {
  arn = "arn:${data.aws_partition.here.partition}"
  # Older providers call `region` `name`; both have the id.
  region  = data.aws_region.here.id
  account = data.aws_caller_identity.here.account_id
  tags    = merge({ "spotfit" = var.name }, var.tags)
  baked   = "${aws_ecr_repository.worker.repository_url}:{spotfit}-py{python}-torch{torch}-${var.image_kind}"
}

# --- the image ------------------------------------------------------------------------------------

resource "aws_ecr_repository" "worker" {
  name                 = var.name
  image_tag_mutability = "IMMUTABLE"
  force_delete         = var.deletable
  tags                 = local.tags

  image_scanning_configuration {
    scan_on_push = true
  }
}

# --- machines -------------------------------------------------------------------------------------

resource "aws_security_group" "agents" {
  name_prefix = "${var.name}-agents-"
  description = "Agents of spotfit connect to each other on ephemeral ports, and to the internet."
  vpc_id      = var.vpc_id
  tags        = local.tags

  ingress {
    description = "from members of this group"
    from_port   = 0
    to_port     = 0
    protocol    = "-1"
    self        = true
  }

  egress {
    description = "the bucket, the registry, AWS"
    from_port   = 0
    to_port     = 0
    protocol    = "-1"
    cidr_blocks = ["0.0.0.0/0"]
  }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_launch_template" "machine" {
  name_prefix = "${var.name}-"

  # Agents read preemption notices from the instance metadata service, version 2. Containers are in the
  # host's network; the second hop is for other containers.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 2
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_size           = var.disk_gib
      volume_type           = "gp3"
      encrypted             = "true"
      delete_on_termination = "true"
    }
  }

  tag_specifications {
    resource_type = "volume"
    tags          = local.tags
  }
}

resource "aws_batch_compute_environment" "spot" {
  type         = "MANAGED"
  state        = "ENABLED"
  service_role = var.service_role != "" ? var.service_role : null
  tags         = local.tags

  compute_resources {
    type                = "SPOT"
    allocation_strategy = "SPOT_PRICE_CAPACITY_OPTIMIZED"
    min_vcpus           = 0
    max_vcpus           = var.max_vcpus
    instance_type       = var.instance_types
    instance_role       = aws_iam_instance_profile.machine.arn
    security_group_ids  = [aws_security_group.agents.id]
    subnets             = var.subnet_ids
    tags                = local.tags

    launch_template {
      launch_template_id = aws_launch_template.machine.id
      version            = "$Latest"
    }
  }

  # An environment keeps its template version: a changed template creates a new environment.
  lifecycle {
    create_before_destroy = true
    replace_triggered_by  = [aws_launch_template.machine.latest_version]
  }

  depends_on = [aws_iam_role_policy_attachment.machine]
}

resource "aws_batch_job_queue" "spot" {
  name     = "${var.name}-spot"
  state    = "ENABLED"
  priority = 1
  tags     = local.tags

  compute_environment_order {
    order               = 1
    compute_environment = aws_batch_compute_environment.spot.arn
  }
}

# --- permissions ----------------------------------------------------------------------------------

data "aws_iam_policy_document" "may_be" {
  for_each = toset(["ec2", "ecs-tasks"])

  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["${each.key}.amazonaws.com"]
    }
  }
}

# The instance role: the ECS agent joins the cluster.
resource "aws_iam_role" "machine" {
  name_prefix        = "${var.name}-machine-"
  assume_role_policy = data.aws_iam_policy_document.may_be["ec2"].json
  tags               = local.tags
}

resource "aws_iam_role_policy_attachment" "machine" {
  role       = aws_iam_role.machine.name
  policy_arn = "${local.arn}:iam::aws:policy/service-role/AmazonEC2ContainerServiceforEC2Role"
}

resource "aws_iam_instance_profile" "machine" {
  name_prefix = "${var.name}-"
  role        = aws_iam_role.machine.name
  tags        = local.tags
}

# The execution role: pulls the image and writes logs.
resource "aws_iam_role" "execution" {
  name_prefix        = "${var.name}-execution-"
  assume_role_policy = data.aws_iam_policy_document.may_be["ecs-tasks"].json
  tags               = local.tags
}

resource "aws_iam_role_policy_attachment" "execution" {
  role       = aws_iam_role.execution.name
  policy_arn = "${local.arn}:iam::aws:policy/service-role/AmazonECSTaskExecutionRolePolicy"
}

# The agents: access to the bucket, and submission of replacements.
resource "aws_iam_role" "agents" {
  name_prefix        = "${var.name}-agents-"
  assume_role_policy = data.aws_iam_policy_document.may_be["ecs-tasks"].json
  tags               = local.tags
}

resource "aws_iam_role_policy_attachment" "agents" {
  for_each = { storage = var.storage_policy_arn, controller = aws_iam_policy.controller.arn }

  role       = aws_iam_role.agents.name
  policy_arn = each.value
}

# The controller: the process that submits machine groups, an agent or the caller of fit().
data "aws_iam_policy_document" "controller" {
  statement {
    sid = "Look"
    actions = [
      "batch:DescribeComputeEnvironments",
      "batch:DescribeJobDefinitions",
      "batch:DescribeJobQueues",
      "batch:DescribeJobs",
      "batch:ListJobs",
      "ec2:DescribeSpotPriceHistory",
      "ec2:GetSpotPlacementScores",
    ]
    resources = ["*"] # these know no narrower one
  }

  statement {
    sid = "Rent"
    actions = [
      "batch:RegisterJobDefinition",
      "batch:SubmitJob",
      "batch:TagResource",
    ]
    resources = [
      aws_batch_job_queue.spot.arn,
      "${local.arn}:batch:${local.region}:${local.account}:job-definition/spotfit-*",
      "${local.arn}:batch:${local.region}:${local.account}:job/*",
    ]
  }

  statement {
    sid       = "LetGo"
    actions   = ["batch:TerminateJob"]
    resources = ["${local.arn}:batch:${local.region}:${local.account}:job/*"]
  }

  statement {
    sid       = "GiveAgentsTheirRoles"
    actions   = ["iam:PassRole"]
    resources = [aws_iam_role.agents.arn, aws_iam_role.execution.arn]

    condition {
      test     = "StringEquals"
      variable = "iam:PassedToService"
      values   = ["batch.amazonaws.com", "ecs-tasks.amazonaws.com"]
    }
  }

  statement {
    sid       = "ReadWhatAgentsPrinted"
    actions   = ["logs:GetLogEvents"]
    resources = ["${local.arn}:logs:${local.region}:${local.account}:log-group:/aws/batch/job:*"]
  }
}

resource "aws_iam_policy" "controller" {
  name_prefix = "${var.name}-controller-"
  description = "Submit and terminate jobs of spotfit runs in ${var.name}."
  policy      = data.aws_iam_policy_document.controller.json
  tags        = local.tags
}
