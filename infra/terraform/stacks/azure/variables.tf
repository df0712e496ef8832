variable "name" {
  description = "What everything here is called after; a resource group of that name is made."
  type        = string
  default     = "spotfit"
}

variable "subscription_id" {
  description = "Who pays."
  type        = string
}

variable "location" {
  description = "Where machines and the container for runs are."
  type        = string
}

variable "account" {
  description = "What the Batch account, the storage account and the registry are called: unique in the world, lower case letters and digits."
  type        = string
}

variable "users" {
  description = "Who calls fit(), by a name of yours: object ids, as `az ad signed-in-user show --query id` tells yours."
  type        = map(string)
}

variable "vm_size" {
  description = "As Standard_D8ds_v5 or Standard_NC4as_T4_v3."
  type        = string
}

variable "subnet" {
  description = "Resource id of the subnet that nodes are in; '' is one of Batch's own."
  type        = string
  default     = ""
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
  description = "Runs that a schedule looks after, as modules/sweeper_azure says; none: no sweeper is made."
  type = map(object({
    url               = string
    key_secret_id     = string
    key_secret_arm_id = string
  }))
  default = {}
}

variable "sweeper_image" {
  description = "The worker image that sweeps, with its tag; needed with swept_runs."
  type        = string
  default     = ""
}
