variable "name" {
  description = "What everything here is called after."
  type        = string
  default     = "spotfit"
}

variable "resource_group_name" {
  description = "Where everything belongs."
  type        = string
}

variable "location" {
  description = "Where sweepers run."
  type        = string
}

variable "identity" {
  description = "Resource id of who sweeps: the agents' identity can do all that is needed, once it may read the keys."
  type        = string
}

variable "identity_client_id" {
  description = "Its client id."
  type        = string
}

variable "identity_principal_id" {
  description = "Its object id."
  type        = string
}

variable "registry" {
  description = "Server the image is pulled from, as that identity."
  type        = string
}

variable "runs" {
  description = "Runs to look after, by a name of yours: each one's URL, the id of the secret in a Key Vault that holds its key, and that secret's resource id."
  type = map(object({
    url               = string
    key_secret_id     = string
    key_secret_arm_id = string
  }))
  default = {}
}

variable "image" {
  description = "The worker image, with a tag: nothing is chosen by versions here."
  type        = string
}

variable "every" {
  description = "How often, as cron says it."
  type        = string
  default     = "*/10 * * * *"
}

variable "tags" {
  description = "On everything."
  type        = map(string)
  default     = {}
}
