# The journal uses conditional creates: blobs must not be versioned, and no rule
# may delete any of them while the run is active.

resource "azurerm_storage_account" "runs" {
  name                            = var.account
  resource_group_name             = var.resource_group_name
  location                        = var.location
  account_kind                    = "StorageV2"
  account_tier                    = "Standard"
  account_replication_type        = var.replication
  https_traffic_only_enabled      = true
  min_tls_version                 = "TLS1_2"
  allow_nested_items_to_be_public = false
  shared_access_key_enabled       = false # access by roles only
  tags                            = var.tags
}

resource "azurerm_storage_container" "runs" {
  name                  = var.container
  storage_account_id    = azurerm_storage_account.runs.id
  container_access_type = "private"
}

resource "azurerm_storage_management_policy" "old_runs" {
  count = var.expire_after_days > 0 ? 1 : 0

  storage_account_id = azurerm_storage_account.runs.id

  rule {
    name    = "old-runs"
    enabled = true

    filters {
      blob_types   = ["blockBlob"]
      prefix_match = ["${azurerm_storage_container.runs.name}/${var.prefix}/"]
    }

    actions {
      base_blob {
        delete_after_days_since_modification_greater_than = var.expire_after_days
      }
    }
  }
}

resource "azurerm_role_assignment" "members" {
  for_each = var.members

  scope                = "${azurerm_storage_account.runs.id}/blobServices/default/containers/${azurerm_storage_container.runs.name}"
  role_definition_name = "Storage Blob Data Contributor"
  principal_id         = each.value
}
