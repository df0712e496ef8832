# The profile spotfit.json: the backend and its options, named as in KubernetesOptions.

output "provisioner" {
  value = "kubernetes"
}

output "kubernetes" {
  value = {
    namespace       = module.cluster.namespace
    service_account = module.cluster.service_account
    image           = module.cluster.image
    flavour         = module.cluster.flavour
  }
}

# Not part of the profile.

output "storage_path" {
  description = "Value for RunConfig(storage_path=...)."
  value       = var.storage_path
}
