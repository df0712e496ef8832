# Everything that spotfit needs on AWS, in one region:
#
#   terraform init && terraform apply -var region=eu-west-1 -var bucket=my-runs
#   terraform output -json > spotfit.json      # next to your script
#   spotfit doctor --provisioner aws_batch --storage "$(terraform output -raw storage_path)"

provider "aws" {
  region = var.region
}

data "aws_vpc" "default" {
  count   = var.vpc_id == "" ? 1 : 0
  default = true
}

data "aws_subnets" "all" {
  filter {
    name   = "vpc-id"
    values = [local.vpc_id]
  }
}

locals {
  vpc_id     = var.vpc_id != "" ? var.vpc_id : data.aws_vpc.default[0].id
  subnet_ids = length(var.subnet_ids) > 0 ? var.subnet_ids : data.aws_subnets.all.ids
}

module "bucket" {
  source = "../../modules/bucket_s3"

  name      = var.bucket
  deletable = var.deletable
}

module "batch" {
  source = "../../modules/aws_batch"

  name               = var.name
  vpc_id             = local.vpc_id
  subnet_ids         = local.subnet_ids
  storage_policy_arn = module.bucket.policy_arn
  instance_types     = var.instance_types
  max_vcpus          = var.max_vcpus
  image              = var.image
  image_kind         = var.image_kind
  service_role       = var.service_role
  deletable          = var.deletable
}

module "sweeper" {
  source = "../../modules/sweeper_aws"
  count  = length(var.swept_runs) > 0 ? 1 : 0

  name               = var.name
  runs               = var.swept_runs
  image              = var.sweeper_image
  job_role           = module.batch.job_role
  service_role       = var.service_role
  subnet_ids         = local.subnet_ids
  security_group_ids = [module.batch.other_security_group]
}
