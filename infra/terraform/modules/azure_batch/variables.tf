variable "name" {
  description = "Prefix of the names of all resources."
  type        = string
  default     = "spotfit"
}

variable "account" {
  description = "Name of the Batch account, unique in its region: lower case letters and digits."
  type        = string
}

variable "registry" {
  description = "Globally unique name of the container registry: letters and digits."
  type        = string
}

variable "resource_group_name" {
  description = "Resource group."
  type        = string
}

variable "location" {
  description = "Region of the machines."
  type        = string
}

variable "users" {
  description = "Callers of fit(), by an arbitrary key: object ids of users and groups."
  type        = map(string)
  default     = {}
}

variable "vm_size" {
  description = "VM size, for example Standard_D8ds_v5; cores, memory and GPUs of the workers must fit into it."
  type        = string
}

variable "subnet" {
  description = "Resource id of the nodes' subnet; '' is a network of Batch."
  type        = string
  default     = ""
}

variable "public_ip" {
  description = "Whether nodes have public addresses; without them the subnet needs another route to Azure."
  type        = bool
  default     = true
}

variable "max_nodes" {
  description = "Largest number of nodes of the pool, at most 100."
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

variable "tags" {
  description = "Labels or tags of all resources."
  type        = map(string)
  default     = {}
}
