# Job queues of spot and of on-demand machines on AWS Batch, with minimal permissions.

data "aws_region" "here" {}
data "aws_caller_identity" "here" {}
data "aws_partition" "here" {}

locals {
  arn = "arn:${data.aws_partition.here.partition}"
  # Older providers call `region` `name`; both have the id.
  region  = data.aws_region.here.id
  account = data.aws_caller_identity.here.account_id
  queues  = { spot = "${var.name}-spot", on_demand = "${var.name}-on-demand" }
  tags    = merge({ "spotfit" = var.name }, var.tags)
  # Of own images the architecture is not known.
  types = var.image != "" ? [] : var.instance_types
  baked = "${aws_ecr_repository.worker.repository_url}:{spotfit}-py{python}-torch{torch}-${var.image_kind}"
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

# The registry keeps the images of recent versions; those of running jobs must not be among the others.
resource "aws_ecr_lifecycle_policy" "worker" {
  repository = aws_ecr_repository.worker.name

  policy = jsonencode({
    rules = [
      {
        rulePriority = 1
        description  = "Layers of interrupted pushes."
        selection    = { tagStatus = "untagged", countType = "sinceImagePushed", countUnit = "days", countNumber = 7 }
        action       = { type = "expire" }
      },
      {
        rulePriority = 2
        description  = "The oldest images."
        selection    = { tagStatus = "any", countType = "imageCountMoreThan", countNumber = var.kept_images }
        action       = { type = "expire" }
      },
    ]
  })
}

# The group of Batch itself, /aws/batch/job, keeps the output of all jobs of the account indefinitely.
resource "aws_cloudwatch_log_group" "jobs" {
  name              = "/spotfit/${var.name}"
  retention_in_days = var.log_retention_days
  tags              = local.tags
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

  # EFA accepts traffic only by a rule that names the group:
  # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html
  egress {
    description = "to members of this group"
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

  # An adapter per network card; only the first one has an IP address of the machine's subnet.
  dynamic "network_interfaces" {
    for_each = range(var.efa_interfaces)

    content {
      device_index          = network_interfaces.value == 0 ? 0 : 1
      network_card_index    = network_interfaces.value
      interface_type        = "efa"
      security_groups       = [aws_security_group.agents.id]
      delete_on_termination = "true"
    }
  }

  tag_specifications {
    resource_type = "volume"
    tags          = local.tags
  }
}

# EFA needs machines in one cluster placement group, which is in one zone.
resource "aws_placement_group" "cluster" {
  count = var.cluster_placement || var.efa_interfaces > 0 ? 1 : 0

  name     = "${var.name}-cluster"
  strategy = "cluster"
  tags     = local.tags
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
    # EC2 rejects security groups beside network interfaces, which have their own.
    security_group_ids = var.efa_interfaces > 0 ? null : [aws_security_group.agents.id]
    placement_group    = one(aws_placement_group.cluster[*].name)
    subnets            = var.subnet_ids
    tags               = local.tags

    launch_template {
      launch_template_id = aws_launch_template.machine.id
      version            = "$Latest"
    }
  }

  lifecycle {
    # An environment keeps its template version: a changed template creates a new environment. Updating
    # the environment instead would end its jobs after 30 minutes, or five days at most
    # (https://docs.aws.amazon.com/batch/latest/APIReference/API_UpdatePolicy.html).
    create_before_destroy = true
    replace_triggered_by  = [aws_launch_template.machine.latest_version]

    precondition {
      condition     = var.image_kind == "cpu" || alltrue([for type in var.instance_types : can(regex("^(g|gr|p)[0-9]", type))])
      error_message = "image_kind = \"cuda\" needs instance_types with GPUs, for example [\"g5\", \"g6\"]: jobs with GPUs would wait indefinitely in other families."
    }

    precondition {
      condition     = var.image_kind == "cpu" || alltrue([for type in local.types : !can(regex("^(p2|p3|p3dn|g2|g3|g3s|g4ad)(\\.|$)", type))])
      error_message = "The image is built with CUDA 13, which supports GPUs from Turing (g4dn) on. p2, p3 and g3 have older ones, and g4ad has GPUs of AMD."
    }

    precondition {
      condition     = alltrue([for type in local.types : !can(regex("^(a1|p6e-gb[0-9]+|[a-z]+[0-9]+[a-z]*g[a-z]*)(\\.|$)", type))])
      error_message = "The image is built for x86-64, but instance_types contains families with Graviton processors (arm64)."
    }
  }

  depends_on = [aws_iam_role_policy_attachment.machine]
}

resource "aws_batch_job_queue" "spot" {
  name     = local.queues.spot
  state    = "ENABLED"
  priority = 1
  tags     = local.tags

  compute_environment_order {
    order               = 1
    compute_environment = aws_batch_compute_environment.spot.arn
  }
}

# Groups are submitted here only if they request on-demand machines.
resource "aws_batch_compute_environment" "on_demand" {
  type         = "MANAGED"
  state        = "ENABLED"
  service_role = var.service_role != "" ? var.service_role : null
  tags         = local.tags

  compute_resources {
    type                = "EC2"
    allocation_strategy = "BEST_FIT_PROGRESSIVE"
    min_vcpus           = 0
    max_vcpus           = var.max_vcpus
    instance_type       = var.instance_types
    instance_role       = aws_iam_instance_profile.machine.arn
    security_group_ids  = var.efa_interfaces > 0 ? null : [aws_security_group.agents.id]
    placement_group     = one(aws_placement_group.cluster[*].name)
    subnets             = var.subnet_ids
    tags                = local.tags

    launch_template {
      launch_template_id = aws_launch_template.machine.id
      version            = "$Latest"
    }
  }

  # As for spot machines.
  lifecycle {
    create_before_destroy = true
    replace_triggered_by  = [aws_launch_template.machine.latest_version]
  }

  depends_on = [aws_iam_role_policy_attachment.machine]
}

resource "aws_batch_job_queue" "on_demand" {
  name     = local.queues.on_demand
  state    = "ENABLED"
  priority = 1
  tags     = local.tags

  compute_environment_order {
    order               = 1
    compute_environment = aws_batch_compute_environment.on_demand.arn
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
      "pricing:GetProducts",
    ]
    resources = ["*"] # these know no narrower one
  }

  statement {
    sid = "Rent"
    actions = [
      "batch:RegisterJobDefinition",
      "batch:SubmitJob",
    ]
    resources = [
      aws_batch_job_queue.spot.arn,
      aws_batch_job_queue.on_demand.arn,
      "${local.arn}:batch:${local.region}:${local.account}:job-definition/spotfit-*",
      "${local.arn}:batch:${local.region}:${local.account}:job/*",
    ]
  }

  # Job ids are random, so jobs of these queues are recognised by a tag that submitted jobs must have.
  statement {
    sid       = "TagOwnJobs"
    actions   = ["batch:TagResource"]
    resources = ["${local.arn}:batch:${local.region}:${local.account}:job/*"]

    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/spotfit:queue"
      values   = values(local.queues)
    }
  }

  statement {
    sid       = "LetGoOfOwnJobs"
    actions   = ["batch:TerminateJob"]
    resources = ["${local.arn}:batch:${local.region}:${local.account}:job/*"]

    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/spotfit:queue"
      values   = values(local.queues)
    }
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
    resources = ["${aws_cloudwatch_log_group.jobs.arn}:*"]
  }
}

resource "aws_iam_policy" "controller" {
  name_prefix = "${var.name}-controller-"
  description = "Submit and terminate jobs of spotfit runs in ${var.name}."
  policy      = data.aws_iam_policy_document.controller.json
  tags        = local.tags
}
