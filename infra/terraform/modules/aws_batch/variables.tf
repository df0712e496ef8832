variable "name" {
  description = "Prefix of the names of all resources."
  type        = string
  default     = "spotfit"
}

variable "vpc_id" {
  description = "Network of the machines."
  type        = string
}

variable "subnet_ids" {
  description = "Subnets of the machines; one per zone gives the most capacity. They need routes to S3, ECR and Batch: a NAT gateway, public addresses, or endpoints."
  type        = list(string)
}

variable "storage_policy_arn" {
  description = "Policy with read and write access to runs: `policy_arn` of modules/bucket_s3."
  type        = string
}

variable "instance_types" {
  description = "Instance types or families; several give more capacity. GPU workers need families with GPUs."
  type        = list(string)
  default     = ["c7i", "m7i", "c6i", "m6i"]
}

variable "max_vcpus" {
  description = "Largest number of vCPUs over all runs."
  type        = number
  default     = 256
}

variable "disk_gib" {
  description = "Disk size of a machine, for the image and the data of workers."
  type        = number
  default     = 100
}

variable "image" {
  description = "Container image; '' is the image of this module's registry for the caller's Python version."
  type        = string
  default     = ""
}

variable "image_kind" {
  description = "Kind of the worker image: cpu or cuda."
  type        = string
  default     = "cpu"

  validation {
    condition     = contains(["cpu", "cuda"], var.image_kind)
    error_message = "cpu or cuda."
  }
}

variable "efa_interfaces" {
  description = "Elastic Fabric Adapters per machine, as many as its instance type has network cards; 0: none. More than one needs private subnets with a NAT gateway or endpoints."
  type        = number
  default     = 0
}

variable "cluster_placement" {
  description = "Whether machines are placed close to each other, in one zone; always with efa_interfaces. Spot capacity is scarcer."
  type        = bool
  default     = false
}

variable "kept_images" {
  description = "Number of images that the registry keeps."
  type        = number
  default     = 30
}

variable "log_retention_days" {
  description = "How long the output of machines is kept."
  type        = number
  default     = 30
}

variable "service_role" {
  description = "ARN of the service role of Batch; '' is AWSServiceRoleForBatch."
  type        = string
  default     = ""
}

variable "deletable" {
  description = "Whether `terraform destroy` may delete the registry with its images."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Tags of all resources and machines."
  type        = map(string)
  default     = {}
}
