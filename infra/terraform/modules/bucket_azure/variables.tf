variable "account" {
  description = "Globally unique name of the storage account: lower case letters and digits."
  type        = string
}

variable "container" {
  description = "Name of the container."
  type        = string
  default     = "spotfit"
}

variable "resource_group_name" {
  description = "Resource group."
  type        = string
}

variable "location" {
  description = "Location; use the region of the machines."
  type        = string
}

variable "replication" {
  description = "LRS keeps copies in one zone, ZRS in three."
  type        = string
  default     = "LRS"
}

variable "prefix" {
  description = "Prefix of runs in the container."
  type        = string
  default     = "runs"

  validation {
    condition     = var.prefix != "" && trim(var.prefix, "/") == var.prefix
    error_message = "A folder without leading or trailing slash."
  }
}

variable "members" {
  description = "Members with read and write access, by an arbitrary key: object ids of users, groups and identities."
  type        = map(string)
  default     = {}
}

variable "expire_after_days" {
  description = "Delete objects this many days after their last write; 0 keeps them."
  type        = number
  default     = 0
}

variable "tags" {
  description = "Labels or tags of all resources."
  type        = map(string)
  default     = {}
}
