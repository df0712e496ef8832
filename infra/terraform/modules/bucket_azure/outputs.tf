output "storage_path" {
  description = "Value for RunConfig(storage_path=...)."
  value       = "az://${azurerm_storage_container.runs.name}/${var.prefix}?account_name=${azurerm_storage_account.runs.name}"
}
