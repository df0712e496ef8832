# Prerequisites of Azure Batch for spot nodes, with minimal permissions. The pool is created by
# the first machine group, and scales to zero.

locals {
  baked = "${azurerm_container_registry.worker.login_server}/spotfit:{spotfit}-py{python}-torch{torch}-${var.image_kind}"

  # Permissions of callers of fit().
  for_users = {
    jobs     = { role = "Azure Batch Job Submitter", scope = azurerm_batch_account.spot.id }
    pool     = { role = "Azure Batch Data Contributor", scope = azurerm_batch_account.spot.id }
    identity = { role = "Managed Identity Operator", scope = azurerm_user_assigned_identity.agents.id }
  }

  users_rights = merge([
    for user, principal in var.users : {
      for what, right in local.for_users : "${user}-${what}" => merge(right, { principal = principal })
    }
  ]...)
}

resource "azurerm_batch_account" "spot" {
  name                         = var.account
  resource_group_name          = var.resource_group_name
  location                     = var.location
  pool_allocation_mode         = "BatchService"
  allowed_authentication_modes = ["AAD"] # no shared keys
  tags                         = var.tags
}

resource "azurerm_container_registry" "worker" {
  name                = var.registry
  resource_group_name = var.resource_group_name
  location            = var.location
  sku                 = "Basic"
  admin_enabled       = false
  tags                = var.tags
}

# --- permissions ----------------------------------------------------------------------------------

resource "azurerm_user_assigned_identity" "agents" {
  name                = "${var.name}-agents"
  resource_group_name = var.resource_group_name
  location            = var.location
  tags                = var.tags
}

# Agents submit replacements.
resource "azurerm_role_assignment" "agents_jobs" {
  scope                = azurerm_batch_account.spot.id
  role_definition_name = "Azure Batch Job Submitter"
  principal_id         = azurerm_user_assigned_identity.agents.principal_id
  principal_type       = "ServicePrincipal"
}

resource "azurerm_role_assignment" "agents_image" {
  scope                = azurerm_container_registry.worker.id
  role_definition_name = "AcrPull"
  principal_id         = azurerm_user_assigned_identity.agents.principal_id
  principal_type       = "ServicePrincipal"
}

resource "azurerm_role_assignment" "users" {
  for_each = local.users_rights

  scope                = each.value.scope
  role_definition_name = each.value.role
  principal_id         = each.value.principal
}
