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

data "aws_route_tables" "all" {
  count  = var.s3_endpoint ? 1 : 0
  vpc_id = local.vpc_id
}

resource "aws_vpc_endpoint" "s3" {
  count = var.s3_endpoint ? 1 : 0

  vpc_id            = local.vpc_id
  vpc_endpoint_type = "Gateway"
  service_name      = "com.amazonaws.${var.region}.s3"
  route_table_ids   = data.aws_route_tables.all[0].ids
  tags              = merge({ Name = "${var.name}-s3" }, var.tags)
}

module "bucket" {
  source = "../../modules/bucket_s3"

  name      = var.bucket
  deletable = var.deletable
  tags      = var.tags
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
  efa_interfaces     = var.efa_interfaces
  cluster_placement  = var.cluster_placement
  log_retention_days = var.log_retention_days
  tags               = var.tags
  service_role       = var.service_role
  deletable          = var.deletable
}

module "sweeper" {
  source = "../../modules/sweeper_aws"
  count  = length(var.swept_runs) > 0 ? 1 : 0

  name               = var.name
  tags               = var.tags
  runs               = var.swept_runs
  image              = var.sweeper_image
  job_role           = module.batch.job_role
  service_role       = var.service_role
  subnet_ids         = local.subnet_ids
  security_group_ids = [module.batch.other_security_group]
}
