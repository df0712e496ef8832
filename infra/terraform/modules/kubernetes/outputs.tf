# Names and types are those of KubernetesOptions.

output "namespace" {
  description = "Namespace of the Jobs."
  value       = kubernetes_namespace_v1.runs.metadata[0].name
}

output "service_account" {
  description = "Service account of the agents."
  value       = kubernetes_service_account_v1.agents.metadata[0].name
}

output "image" {
  description = "Container image of the machines."
  value       = var.image
}

output "flavour" {
  description = "Platform whose spot nodes are selected."
  value       = var.flavour
}
