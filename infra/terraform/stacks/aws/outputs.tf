# What a spotfit.json says: the backend, and its options by the names of AwsBatchOptions.

output "provisioner" {
  value = "aws_batch"
}

output "aws_batch" {
  value = {
    queues         = module.batch.queues
    region         = module.batch.region
    image          = module.batch.image
    job_role       = module.batch.job_role
    execution_role = module.batch.execution_role
  }
}

# For you.

output "storage_path" {
  description = "For RunConfig(storage_path=...)."
  value       = module.bucket.storage_path
}

output "repository" {
  description = "Where worker_image/bake.sh may push to."
  value       = module.batch.other_repository
}

output "policies" {
  description = "For whoever calls fit()."
  value       = [module.bucket.policy_arn, module.batch.other_controller_policy_arn]
}
