# The profile spotfit.json: the backend and its options, named as in GcpBatchOptions.

output "provisioner" {
  value = "gcp_batch"
}

output "gcp_batch" {
  value = {
    project         = module.batch.project
    region          = module.batch.region
    image           = module.batch.image
    service_account = module.batch.service_account
    machine_type    = module.batch.machine_type
    accelerator     = module.batch.accelerator
    network         = module.batch.network
    subnetwork      = module.batch.subnetwork
    external_ip     = module.batch.external_ip
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
