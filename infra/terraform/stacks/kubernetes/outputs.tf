# What a spotfit.json says: the backend, and its options by the names of KubernetesOptions.

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

# For you.

output "storage_path" {
  description = "For RunConfig(storage_path=...)."
  value       = var.storage_path
}
