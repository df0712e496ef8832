variable "name" {
  description = "Prefix of the names of all resources."
  type        = string
  default     = "spotfit"
}

variable "region" {
  description = "Region of machines and bucket."
  type        = string
}

variable "bucket" {
  description = "Globally unique name of the bucket that is created for runs."
  type        = string
}

variable "vpc_id" {
  description = "Id of the machines' network; '' is the default one."
  type        = string
  default     = ""
}

variable "subnet_ids" {
  description = "Subnets of that network; empty: all."
  type        = list(string)
  default     = []
}

variable "instance_types" {
  description = "Instance types or families."
  type        = list(string)
  default     = ["c7i", "m7i", "c6i", "m6i"]
}

variable "max_vcpus" {
  description = "Largest number of vCPUs over all runs."
  type        = number
  default     = 256
}

variable "image" {
  description = "Container image; '' is the image of the created registry for the caller's Python version."
  type        = string
  default     = ""
}

variable "image_kind" {
  description = "cpu or cuda."
  type        = string
  default     = "cpu"
}

variable "efa_interfaces" {
  description = "Elastic Fabric Adapters per machine; 0: none."
  type        = number
  default     = 0
}

variable "cluster_placement" {
  description = "Whether machines are placed close to each other, in one zone."
  type        = bool
  default     = false
}

variable "s3_endpoint" {
  description = "Whether to create a gateway endpoint for S3 in the network, which is free: without it, private subnets reach the bucket through a NAT gateway, which charges per GiB. A network can have one."
  type        = bool
  default     = false
}

variable "log_retention_days" {
  description = "How long the output of machines is kept."
  type        = number
  default     = 30
}

variable "tags" {
  description = "Tags of all resources and machines."
  type        = map(string)
  default     = {}
}

variable "swept_runs" {
  description = "Runs of modules/sweeper_aws; empty: no sweeper is created."
  type = map(object({
    url            = string
    key_secret_arn = string
  }))
  default = {}
}

variable "sweeper_image" {
  description = "Worker image of the sweeper, with a tag; required with swept_runs."
  type        = string
  default     = ""
}

variable "service_role" {
  description = "ARN of the service role of Batch; '' is AWSServiceRoleForBatch."
  type        = string
  default     = ""
}

variable "deletable" {
  description = "Whether `terraform destroy` may delete runs and images."
  type        = bool
  default     = false
}
