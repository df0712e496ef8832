# Names and types are those of GcpBatchOptions.

output "project" {
  description = "Project or subscription that is billed."
  value       = var.project
}

output "region" {
  description = "Region of the machines."
  value       = var.region
}

output "image" {
  description = "Container image of the machines."
  value       = var.image != "" ? var.image : local.baked
}

output "service_account" {
  description = "Service account of the agents."
  value       = google_service_account.agents.email
}

output "machine_type" {
  description = "'' lets Batch choose."
  value       = var.machine_type
}

output "accelerator" {
  description = "Type of attached GPUs."
  value       = var.accelerator
}

output "network" {
  description = "Network of the machines."
  value       = "projects/${var.project}/global/networks/${var.network}"
}

output "subnetwork" {
  description = "Subnetwork of the machines."
  value       = var.subnetwork == "" ? "" : "projects/${var.project}/regions/${var.region}/subnetworks/${var.subnetwork}"
}

output "external_ip" {
  description = "Whether machines have public addresses."
  value       = var.external_ip
}

# Not options.

output "other_repository" {
  description = "Repository for worker_image/bake.sh."
  value       = "${local.registry}/worker"
}

output "other_agents" {
  description = "The agents as an IAM member."
  value       = local.agents
}
