# Named and typed as the fields of GcpBatchOptions.

output "project" {
  description = "Who pays."
  value       = var.project
}

output "region" {
  description = "Where machines are."
  value       = var.region
}

output "image" {
  description = "What machines run."
  value       = var.image != "" ? var.image : local.baked
}

output "service_account" {
  description = "Who the agents are."
  value       = google_service_account.agents.email
}

output "machine_type" {
  description = "'' lets Batch choose."
  value       = var.machine_type
}

output "accelerator" {
  description = "Type of GPUs that are attached."
  value       = var.accelerator
}

output "network" {
  description = "Where machines are."
  value       = "projects/${var.project}/global/networks/${var.network}"
}

output "subnetwork" {
  description = "Which part of it."
  value       = var.subnetwork == "" ? "" : "projects/${var.project}/regions/${var.region}/subnetworks/${var.subnetwork}"
}

output "external_ip" {
  description = "Whether machines have public addresses."
  value       = var.external_ip
}

# Beyond the options.

output "other_repository" {
  description = "Where worker_image/bake.sh may push to."
  value       = "${local.registry}/worker"
}

output "other_agents" {
  description = "The agents as IAM writes them."
  value       = local.agents
}
