# Names and types are those of AzureBatchOptions.

output "endpoint" {
  description = "URL of the Batch account."
  value       = "https://${azurerm_batch_account.spot.account_endpoint}"
}

output "account_id" {
  description = "Resource id of the Batch account."
  value       = azurerm_batch_account.spot.id
}

output "image" {
  description = "Container image of the nodes."
  value       = var.image != "" ? var.image : local.baked
}

output "registry" {
  description = "Registry of the image."
  value       = azurerm_container_registry.worker.login_server
}

output "identity" {
  description = "Resource id of the identity of the agents."
  value       = azurerm_user_assigned_identity.agents.id
}

output "identity_client_id" {
  description = "Client id of that identity."
  value       = azurerm_user_assigned_identity.agents.client_id
}

output "vm_size" {
  description = "VM size of the nodes."
  value       = var.vm_size
}

output "subnet" {
  description = "Subnet of the nodes."
  value       = var.subnet
}

output "public_ip" {
  description = "Whether nodes have public addresses."
  value       = var.public_ip
}

output "max_nodes" {
  description = "Largest number of nodes of the pool."
  value       = var.max_nodes
}

# Not options.

output "other_repository" {
  description = "Repository for worker_image/bake.sh."
  value       = "${azurerm_container_registry.worker.login_server}/spotfit"
}

output "other_agents_principal_id" {
  description = "Object id of the agents."
  value       = azurerm_user_assigned_identity.agents.principal_id
}
