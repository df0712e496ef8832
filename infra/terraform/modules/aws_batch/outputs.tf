# Named and typed as the fields of AwsBatchOptions.

output "queues" {
  description = "Job queues."
  value       = [aws_batch_job_queue.spot.name]
}

output "region" {
  description = "Where they are."
  value       = data.aws_region.here.id
}

output "image" {
  description = "What machines run."
  value       = var.image != "" ? var.image : local.baked
}

output "job_role" {
  description = "Who the agents are."
  value       = aws_iam_role.agents.arn
}

output "execution_role" {
  description = "Who pulls the image and writes the logs."
  value       = aws_iam_role.execution.arn
}

# Beyond the options.

output "other_repository" {
  description = "Where worker_image/bake.sh may push to."
  value       = aws_ecr_repository.worker.repository_url
}

output "other_controller_policy_arn" {
  description = "For whoever calls fit(): rent and let go machines."
  value       = aws_iam_policy.controller.arn
}

output "other_security_group" {
  description = "Of the agents."
  value       = aws_security_group.agents.id
}
