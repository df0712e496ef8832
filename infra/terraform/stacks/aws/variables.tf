variable "name" {
  description = "What everything here is called after."
  type        = string
  default     = "spotfit"
}

variable "region" {
  description = "Where machines and the bucket are."
  type        = string
}

variable "bucket" {
  description = "Name of the bucket that is made for runs; unique in the world."
  type        = string
}

variable "vpc_id" {
  description = "The network machines are in; '' is the default one."
  type        = string
  default     = ""
}

variable "subnet_ids" {
  description = "Where in that network; none named: everywhere."
  type        = list(string)
  default     = []
}

variable "instance_types" {
  description = "Types or families of instances."
  type        = list(string)
  default     = ["c7i", "m7i", "c6i", "m6i"]
}

variable "max_vcpus" {
  description = "How many virtual CPUs there are at most, over all runs."
  type        = number
  default     = 256
}

variable "image" {
  description = "Container image; '' is the one in the registry that is made here, by the Python of whoever calls fit()."
  type        = string
  default     = ""
}

variable "image_kind" {
  description = "cpu or cuda."
  type        = string
  default     = "cpu"
}

variable "swept_runs" {
  description = "Runs that a schedule looks after, as modules/sweeper_aws says; none: no sweeper is made."
  type = map(object({
    url            = string
    key_secret_arn = string
  }))
  default = {}
}

variable "sweeper_image" {
  description = "The worker image that sweeps, with its tag; needed with swept_runs."
  type        = string
  default     = ""
}

variable "service_role" {
  description = "ARN of the role of Batch itself; '' is AWS's own, AWSServiceRoleForBatch."
  type        = string
  default     = ""
}

variable "deletable" {
  description = "Whether `terraform destroy` may delete runs and images."
  type        = bool
  default     = false
}
