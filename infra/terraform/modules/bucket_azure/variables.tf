variable "account" {
  description = "Name of the storage account; unique in the world, lower case letters and digits."
  type        = string
}

variable "container" {
  description = "Name of the container."
  type        = string
  default     = "spotfit"
}

variable "resource_group_name" {
  description = "Where it belongs."
  type        = string
}

variable "location" {
  description = "Where it is: the region of the machines."
  type        = string
}

variable "replication" {
  description = "LRS keeps copies in one zone, ZRS in three."
  type        = string
  default     = "LRS"
}

variable "prefix" {
  description = "Where runs lie in the container."
  type        = string
  default     = "runs"

  validation {
    condition     = var.prefix != "" && trim(var.prefix, "/") == var.prefix
    error_message = "A folder without slashes around it."
  }
}

variable "members" {
  description = "Who reads and writes runs, by a name of yours: object ids of users, groups and identities."
  type        = map(string)
  default     = {}
}

variable "expire_after_days" {
  description = "Runs are deleted so many days after they were last written; 0 keeps them."
  type        = number
  default     = 0
}

variable "tags" {
  description = "On everything."
  type        = map(string)
  default     = {}
}
