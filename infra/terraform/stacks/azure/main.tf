# Everything that spotfit needs on Azure, in one region:
#
#   terraform init && terraform apply -var subscription_id=… -var location=westeurope -var account=myruns \
#     -var vm_size=Standard_D8ds_v5 -var "users={me=\"$(az ad signed-in-user show --query id -o tsv)\"}"
#   terraform output -json > spotfit.json      # next to your script
#   spotfit doctor --provisioner azure_batch --storage "$(terraform output -raw storage_path)"

provider "azurerm" {
  subscription_id     = var.subscription_id
  storage_use_azuread = true

  # By default, version 4 registers others, but neither Microsoft.App nor Microsoft.Batch, and version 5 registers none.
  resource_providers_to_register = [
    "Microsoft.App",
    "Microsoft.Batch",
    "Microsoft.ContainerRegistry",
    "Microsoft.ManagedIdentity",
    "Microsoft.Storage",
  ]

  features {}
}

resource "azurerm_resource_group" "all" {
  name     = var.name
  location = var.location
}

module "bucket" {
  source = "../../modules/bucket_azure"

  account             = var.account
  resource_group_name = azurerm_resource_group.all.name
  location            = azurerm_resource_group.all.location
  members             = merge({ agents = module.batch.other_agents_principal_id }, var.users)
}

module "batch" {
  source = "../../modules/azure_batch"

  name                = var.name
  account             = var.account
  registry            = var.account
  resource_group_name = azurerm_resource_group.all.name
  location            = azurerm_resource_group.all.location
  users               = var.users
  vm_size             = var.vm_size
  subnet              = var.subnet
  image               = var.image
  image_kind          = var.image_kind
}

module "sweeper" {
  source = "../../modules/sweeper_azure"
  count  = length(var.swept_runs) > 0 ? 1 : 0

  name                  = var.name
  resource_group_name   = azurerm_resource_group.all.name
  location              = azurerm_resource_group.all.location
  identity              = module.batch.identity
  identity_client_id    = module.batch.identity_client_id
  identity_principal_id = module.batch.other_agents_principal_id
  registry              = module.batch.registry
  runs                  = var.swept_runs
  image                 = var.sweeper_image
}
