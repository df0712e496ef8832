# Named and typed as the fields of AzureBatchOptions.

output "endpoint" {
  description = "Of the Batch account."
  value       = "https://${azurerm_batch_account.spot.account_endpoint}"
}

output "account_id" {
  description = "Resource id of the Batch account."
  value       = azurerm_batch_account.spot.id
}

output "image" {
  description = "What nodes run."
  value       = var.image != "" ? var.image : local.baked
}

output "registry" {
  description = "Where the image is pulled from."
  value       = azurerm_container_registry.worker.login_server
}

output "identity" {
  description = "Who the agents are."
  value       = azurerm_user_assigned_identity.agents.id
}

output "identity_client_id" {
  description = "Which one they are, where nodes have several."
  value       = azurerm_user_assigned_identity.agents.client_id
}

output "vm_size" {
  description = "Of the nodes."
  value       = var.vm_size
}

output "subnet" {
  description = "Where nodes are."
  value       = var.subnet
}

output "public_ip" {
  description = "Whether nodes have public addresses."
  value       = var.public_ip
}

output "most_nodes" {
  description = "How many nodes the pool may have."
  value       = var.most_nodes
}

# Beyond the options.

output "other_repository" {
  description = "Where worker_image/bake.sh may push to."
  value       = "${azurerm_container_registry.worker.login_server}/spotfit"
}

output "other_agents_principal_id" {
  description = "Object id of the agents."
  value       = azurerm_user_assigned_identity.agents.principal_id
}
