variable "name" {
  description = "Globally unique name of the bucket."
  type        = string
}

variable "prefix" {
  description = "Prefix of runs in the bucket."
  type        = string
  default     = "runs"

  validation {
    condition     = var.prefix != "" && trim(var.prefix, "/") == var.prefix
    error_message = "A folder without leading or trailing slash."
  }
}

variable "expire_after_days" {
  description = "Delete objects this many days after their last write; 0 keeps them."
  type        = number
  default     = 0
}

variable "deletable" {
  description = "Whether `terraform destroy` may delete the bucket with its objects."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Labels or tags of all resources."
  type        = map(string)
  default     = {}
}
