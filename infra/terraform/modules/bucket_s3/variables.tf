variable "name" {
  description = "Name of the bucket; unique in the world."
  type        = string
}

variable "prefix" {
  description = "Where runs lie in the bucket."
  type        = string
  default     = "runs"

  validation {
    condition     = var.prefix != "" && trim(var.prefix, "/") == var.prefix
    error_message = "A folder without slashes around it."
  }
}

variable "expire_after_days" {
  description = "Runs are deleted so many days after they were last written; 0 keeps them."
  type        = number
  default     = 0
}

variable "deletable" {
  description = "Whether `terraform destroy` may delete the bucket with what is in it."
  type        = bool
  default     = false
}

variable "tags" {
  description = "On everything."
  type        = map(string)
  default     = {}
}
