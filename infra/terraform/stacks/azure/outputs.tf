# The profile spotfit.json: the backend and its options, named as in AzureBatchOptions.

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

# Not part of the profile.

output "storage_path" {
  description = "Value for RunConfig(storage_path=...)."
  value       = module.bucket.storage_path
}

output "repository" {
  description = "Repository for worker_image/bake.sh."
  value       = module.batch.other_repository
}
