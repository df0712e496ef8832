variable "name" {
  description = "Prefix of the names of all resources, and the name of the resource group that is created."
  type        = string
  default     = "spotfit"
}

variable "subscription_id" {
  description = "Project or subscription that is billed."
  type        = string
}

variable "location" {
  description = "Location of machines and container."
  type        = string
}

variable "account" {
  description = "Name of the Batch account, the storage account and the registry: globally unique, lower case letters and digits."
  type        = string
}

variable "users" {
  description = "Callers of fit(), by an arbitrary key: object ids (`az ad signed-in-user show --query id`)."
  type        = map(string)
}

variable "vm_size" {
  description = "VM size, for example Standard_D8ds_v5."
  type        = string
}

variable "subnet" {
  description = "Resource id of the nodes' subnet; '' is a network of Batch."
  type        = string
  default     = ""
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

variable "swept_runs" {
  description = "Runs of modules/sweeper_azure; empty: no sweeper is created."
  type = map(object({
    url               = string
    key_secret_id     = string
    key_secret_arm_id = string
  }))
  default = {}
}

variable "sweeper_image" {
  description = "Worker image of the sweeper, with a tag; required with swept_runs."
  type        = string
  default     = ""
}
