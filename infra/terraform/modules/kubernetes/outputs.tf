# Named and typed as the fields of KubernetesOptions.

output "namespace" {
  description = "Where Jobs are."
  value       = kubernetes_namespace_v1.runs.metadata[0].name
}

output "service_account" {
  description = "Who the agents are."
  value       = kubernetes_service_account_v1.agents.metadata[0].name
}

output "image" {
  description = "What machines run."
  value       = var.image
}

output "flavour" {
  description = "Whose spot nodes are chosen."
  value       = var.flavour
}
