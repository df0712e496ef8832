variable "name" {
  description = "What everything here is called after."
  type        = string
  default     = "spotfit"
}

variable "vpc_id" {
  description = "The network that machines are in."
  type        = string
}

variable "subnet_ids" {
  description = "Where machines may be; one in every zone finds the most capacity. They need a way to S3, ECR and Batch: a NAT gateway, public addresses, or endpoints."
  type        = list(string)
}

variable "storage_policy_arn" {
  description = "Lets agents read and write runs: `policy_arn` of modules/bucket_s3."
  type        = string
}

variable "instance_types" {
  description = "Types or families of instances; several find more capacity. Families with GPUs for GPUs."
  type        = list(string)
  default     = ["c7i", "m7i", "c6i", "m6i"]
}

variable "max_vcpus" {
  description = "How many virtual CPUs there are at most, over all runs."
  type        = number
  default     = 256
}

variable "disk_gib" {
  description = "Size of each machine's disk: the image, and what workers write."
  type        = number
  default     = 100
}

variable "image" {
  description = "Container image; '' is the one in this module's registry that was baked for the Python of whoever calls fit()."
  type        = string
  default     = ""
}

variable "image_kind" {
  description = "Which of worker_image's images: cpu or cuda."
  type        = string
  default     = "cpu"

  validation {
    condition     = contains(["cpu", "cuda"], var.image_kind)
    error_message = "cpu or cuda."
  }
}

variable "service_role" {
  description = "ARN of the role of Batch itself; '' is AWS's own, AWSServiceRoleForBatch."
  type        = string
  default     = ""
}

variable "deletable" {
  description = "Whether `terraform destroy` may delete the registry with the images in it."
  type        = bool
  default     = false
}

variable "tags" {
  description = "On everything, machines included."
  type        = map(string)
  default     = {}
}
