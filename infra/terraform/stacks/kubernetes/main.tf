# Everything that spotfit needs in an existing cluster:
#
#   terraform init && terraform apply -var image=registry.example.com/spotfit:0.1.0-py3.11-torch2.13.0-cpu \
#     -var flavour=gke -var storage_path=gs://my-runs/runs
#   terraform output -json > spotfit.json      # next to your script
#   spotfit doctor --provisioner kubernetes --storage "$(terraform output -raw storage_path)"

provider "kubernetes" {
  config_path    = var.kubeconfig
  config_context = var.context
}

module "cluster" {
  source = "../../modules/kubernetes"

  namespace                   = var.namespace
  image                       = var.image
  flavour                     = var.flavour
  pod_security                = var.pod_security
  service_account_annotations = var.service_account_annotations
  users                       = var.users
  groups                      = var.groups
}

module "sweeper" {
  source = "../../modules/sweeper_kubernetes"
  count  = length(var.swept_runs) > 0 ? 1 : 0

  namespace       = module.cluster.namespace
  service_account = module.cluster.service_account
  runs            = var.swept_runs
  image           = var.sweeper_image
}
