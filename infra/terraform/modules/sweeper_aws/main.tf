# A schedule that runs `spotfit sweep` on Fargate for runs without machines; one execution costs a
# few seconds of a quarter of a CPU.

data "aws_partition" "here" {}

locals {
  arn  = "arn:${data.aws_partition.here.partition}"
  tags = merge({ "spotfit" = var.name }, var.tags)
  keys = distinct([for run in var.runs : run.key_secret_arn])
}

resource "aws_batch_compute_environment" "sweeper" {
  type         = "MANAGED"
  state        = "ENABLED"
  service_role = var.service_role != "" ? var.service_role : null
  tags         = local.tags

  compute_resources {
    type               = "FARGATE"
    max_vcpus          = 4
    security_group_ids = var.security_group_ids
    subnets            = var.subnet_ids
  }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_batch_job_queue" "sweeper" {
  name     = "${var.name}-sweeper"
  state    = "ENABLED"
  priority = 1
  tags     = local.tags

  compute_environment_order {
    order               = 1
    compute_environment = aws_batch_compute_environment.sweeper.arn
  }
}

resource "aws_batch_job_definition" "sweep" {
  for_each = var.runs

  name                  = "${var.name}-sweep-${each.key}"
  type                  = "container"
  platform_capabilities = ["FARGATE"]
  tags                  = local.tags

  container_properties = jsonencode({
    image                = var.image
    command              = ["spotfit", "sweep", each.value.url]
    jobRoleArn           = var.job_role
    executionRoleArn     = aws_iam_role.execution.arn
    secrets              = [{ name = "SPOTFIT_RUN_SECRET", valueFrom = each.value.key_secret_arn }]
    networkConfiguration = { assignPublicIp = var.public_ip ? "ENABLED" : "DISABLED" }
    resourceRequirements = [
      { type = "VCPU", value = "0.25" },
      { type = "MEMORY", value = "1024" },
    ]
  })

  retry_strategy {
    attempts = 1
  }

  timeout {
    attempt_duration_seconds = 600
  }
}

resource "aws_scheduler_schedule" "sweep" {
  for_each = var.runs

  name                = "${var.name}-sweep-${each.key}"
  description         = "Run spotfit sweep for ${each.value.url}."
  schedule_expression = var.every

  flexible_time_window {
    mode = "OFF"
  }

  target {
    arn      = "${local.arn}:scheduler:::aws-sdk:batch:submitJob"
    role_arn = aws_iam_role.scheduler.arn

    input = jsonencode({
      JobName       = "spotfit-sweep-${each.key}"
      JobQueue      = aws_batch_job_queue.sweeper.arn
      JobDefinition = aws_batch_job_definition.sweep[each.key].arn
    })

    retry_policy {
      maximum_retry_attempts = 0 # the next look comes soon
    }
  }
}

# --- permissions ----------------------------------------------------------------------------------

data "aws_iam_policy_document" "may_be" {
  for_each = toset(["ecs-tasks", "scheduler"])

  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["${each.key}.amazonaws.com"]
    }
  }
}

# The execution role: pulls the image, writes logs and reads the keys of these runs.
resource "aws_iam_role" "execution" {
  name_prefix        = "${var.name}-sweeper-"
  assume_role_policy = data.aws_iam_policy_document.may_be["ecs-tasks"].json
  tags               = local.tags
}

resource "aws_iam_role_policy_attachment" "execution" {
  role       = aws_iam_role.execution.name
  policy_arn = "${local.arn}:iam::aws:policy/service-role/AmazonECSTaskExecutionRolePolicy"
}

data "aws_iam_policy_document" "keys" {
  count = length(local.keys) > 0 ? 1 : 0

  statement {
    actions   = ["secretsmanager:GetSecretValue"]
    resources = local.keys
  }
}

resource "aws_iam_role_policy" "keys" {
  count = length(local.keys) > 0 ? 1 : 0

  name   = "keys-of-runs"
  role   = aws_iam_role.execution.id
  policy = data.aws_iam_policy_document.keys[0].json
}

resource "aws_iam_role" "scheduler" {
  name_prefix        = "${var.name}-schedule-"
  assume_role_policy = data.aws_iam_policy_document.may_be["scheduler"].json
  tags               = local.tags
}

data "aws_iam_policy_document" "scheduler" {
  count = length(var.runs) > 0 ? 1 : 0

  statement {
    actions = ["batch:SubmitJob"]
    resources = concat(
      [aws_batch_job_queue.sweeper.arn],
      [for definition in aws_batch_job_definition.sweep : "${definition.arn_prefix}:*"],
    )
  }
}

resource "aws_iam_role_policy" "scheduler" {
  count = length(var.runs) > 0 ? 1 : 0

  name   = "submit-sweeps"
  role   = aws_iam_role.scheduler.id
  policy = data.aws_iam_policy_document.scheduler[0].json
}
