# The profile spotfit.json: the backend and its options, named as in AwsBatchOptions.

output "provisioner" {
  value = "aws_batch"
}

output "aws_batch" {
  value = {
    queues           = module.batch.queues
    on_demand_queues = module.batch.on_demand_queues
    region           = module.batch.region
    image            = module.batch.image
    job_role         = module.batch.job_role
    execution_role   = module.batch.execution_role
    log_group        = module.batch.log_group
    efa_devices      = module.batch.efa_devices
  }
}

# Not part of the profile.

output "storage_path" {
  description = "Value for RunConfig(storage_path=...)."
  value       = module.bucket.storage_path
}

output "repository" {
  description = "Repository for worker_image/bake.sh."
  value       = module.batch.other_repository
}

output "policies" {
  description = "Policies for callers of fit()."
  value       = [module.bucket.policy_arn, module.batch.other_controller_policy_arn]
}
