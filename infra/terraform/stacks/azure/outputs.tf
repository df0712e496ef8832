# What a spotfit.json says: the backend, and its options by the names of AzureBatchOptions.

output "provisioner" {
  value = "azure_batch"
}

output "azure_batch" {
  value = {
    endpoint           = module.batch.endpoint
    account_id         = module.batch.account_id
    image              = module.batch.image
    registry           = module.batch.registry
    identity           = module.batch.identity
    identity_client_id = module.batch.identity_client_id
    vm_size            = module.batch.vm_size
    subnet             = module.batch.subnet
    public_ip          = module.batch.public_ip
    max_nodes          = module.batch.max_nodes
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
