# Everything that spotfit needs on Google Cloud, in one region:
#
#   gcloud services enable cloudresourcemanager.googleapis.com --project=mine
#   terraform init && terraform apply -var project=mine -var region=us-central1 -var bucket=my-runs \
#     -var 'users={me="user:me@example.com"}'
#   terraform output -json > spotfit.json      # next to your script
#   spotfit doctor --provisioner gcp_batch --storage "$(terraform output -raw storage_path)"

provider "google" {
  project = var.project
  region  = var.region
}

module "bucket" {
  source = "../../modules/bucket_gcs"

  name      = var.bucket
  project   = var.project
  location  = var.region
  members   = merge({ agents = module.batch.other_agents }, var.users)
  deletable = var.deletable
}

module "batch" {
  source = "../../modules/gcp_batch"

  name         = var.name
  project      = var.project
  region       = var.region
  users        = var.users
  network      = var.network
  subnetwork   = var.subnetwork
  machine_type = var.machine_type
  accelerator  = var.accelerator
  image        = var.image
  image_kind   = var.image_kind
}

module "sweeper" {
  source = "../../modules/sweeper_gcp"
  count  = length(var.swept_runs) > 0 ? 1 : 0

  name            = var.name
  project         = var.project
  region          = var.region
  service_account = module.batch.service_account
  runs            = var.swept_runs
  image           = var.sweeper_image
}
