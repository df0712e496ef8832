# A schedule that runs `spotfit sweep` as jobs of Azure Container Apps.

resource "azurerm_container_app_environment" "sweeper" {
  name                = "${var.name}-sweeper"
  resource_group_name = var.resource_group_name
  location            = var.location
  tags                = var.tags
}

resource "azurerm_container_app_job" "sweep" {
  for_each = var.runs

  name                         = "${var.name}-sweep-${each.key}"
  resource_group_name          = var.resource_group_name
  location                     = var.location
  container_app_environment_id = azurerm_container_app_environment.sweeper.id
  replica_timeout_in_seconds   = 600
  replica_retry_limit          = 0
  tags                         = var.tags

  identity {
    type         = "UserAssigned"
    identity_ids = [var.identity]
  }

  registry {
    server   = var.registry
    identity = var.identity
  }

  secret {
    name                = "key"
    identity            = var.identity
    key_vault_secret_id = each.value.key_secret_id
  }

  schedule_trigger_config {
    cron_expression = var.every
  }

  template {
    container {
      name    = "sweep"
      image   = var.image
      cpu     = 0.5
      memory  = "1Gi"
      command = ["spotfit", "sweep", each.value.url]

      env {
        name        = "SPOTFIT_RUN_SECRET"
        secret_name = "key"
      }

      env {
        name  = "AZURE_CLIENT_ID"
        value = var.identity_client_id
      }
    }
  }

  depends_on = [azurerm_role_assignment.keys]
}

# The sweeper may read only the keys of these runs.
resource "azurerm_role_assignment" "keys" {
  for_each = var.runs

  scope                = each.value.key_secret_arm_id
  role_definition_name = "Key Vault Secrets User"
  principal_id         = var.identity_principal_id
  principal_type       = "ServicePrincipal"
}
