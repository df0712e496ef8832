variable "name" {
  description = "What everything here is called after."
  type        = string
  default     = "spotfit"
}

variable "account" {
  description = "Name of the Batch account; unique in its region, lower case letters and digits."
  type        = string
}

variable "registry" {
  description = "Name of the container registry; unique in the world, letters and digits."
  type        = string
}

variable "resource_group_name" {
  description = "Where everything belongs."
  type        = string
}

variable "location" {
  description = "Where machines are."
  type        = string
}

variable "users" {
  description = "Who calls fit(), by a name of yours: object ids of users and groups."
  type        = map(string)
  default     = {}
}

variable "vm_size" {
  description = "As Standard_D8ds_v5 or Standard_NC4as_T4_v3: cores, memory and GPUs of the workers must fit into it."
  type        = string
}

variable "subnet" {
  description = "Resource id of the subnet that nodes are in; '' is one of Batch's own."
  type        = string
  default     = ""
}

variable "public_ip" {
  description = "Whether nodes have public addresses; without them a subnet needs another way out to Azure."
  type        = bool
  default     = true
}

variable "max_nodes" {
  description = "How many nodes the pool may have: 100 at most."
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

variable "tags" {
  description = "On everything."
  type        = map(string)
  default     = {}
}
