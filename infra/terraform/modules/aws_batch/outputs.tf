# Names and types are those of AwsBatchOptions.

output "queues" {
  description = "Job queues."
  value       = [aws_batch_job_queue.spot.name]
}

output "on_demand_queues" {
  description = "Job queues of on-demand machines."
  value       = [aws_batch_job_queue.on_demand.name]
}

output "region" {
  description = "Region."
  value       = data.aws_region.here.id
}

output "image" {
  description = "Container image of the machines."
  value       = var.image != "" ? var.image : local.baked
}

output "job_role" {
  description = "Service account of the agents."
  value       = aws_iam_role.agents.arn
}

output "execution_role" {
  description = "Role that pulls the image and writes logs."
  value       = aws_iam_role.execution.arn
}

output "log_group" {
  description = "CloudWatch log group of the machines."
  value       = aws_cloudwatch_log_group.jobs.name
}

output "efa_devices" {
  description = "Elastic Fabric Adapters per machine."
  value       = var.efa_interfaces
}

# Not options.

output "other_repository" {
  description = "Repository for worker_image/bake.sh."
  value       = aws_ecr_repository.worker.repository_url
}

output "other_controller_policy_arn" {
  description = "Policy for callers of fit(): submit and terminate jobs."
  value       = aws_iam_policy.controller.arn
}

output "other_security_group" {
  description = "Security group of the machines."
  value       = aws_security_group.agents.id
}
