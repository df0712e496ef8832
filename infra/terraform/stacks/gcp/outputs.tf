# What a spotfit.json says: the backend, and its options by the names of GcpBatchOptions.

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

# For you.

output "storage_path" {
  description = "For RunConfig(storage_path=...)."
  value       = module.bucket.storage_path
}

output "repository" {
  description = "Where worker_image/bake.sh may push to."
  value       = module.batch.other_repository
}
