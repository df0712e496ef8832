variable "name" {
  description = "Prefix of the names of all resources."
  type        = string
  default     = "spotfit"
}

variable "resource_group_name" {
  description = "Resource group."
  type        = string
}

variable "location" {
  description = "Region of the sweepers."
  type        = string
}

variable "identity" {
  description = "Resource id of the sweeper's identity; the agents' identity has the required permissions except reading the keys."
  type        = string
}

variable "identity_client_id" {
  description = "Client id of the identity."
  type        = string
}

variable "identity_principal_id" {
  description = "Object id of the identity."
  type        = string
}

variable "registry" {
  description = "Registry from which the identity pulls the image."
  type        = string
}

variable "runs" {
  description = "Runs to sweep, by an arbitrary key: URL, id of the Key Vault secret with the run key, and the secret's resource id."
  type = map(object({
    url               = string
    key_secret_id     = string
    key_secret_arm_id = string
  }))
  default = {}
}

variable "image" {
  description = "Worker image with a tag; placeholders are not replaced."
  type        = string
}

variable "every" {
  description = "Schedule, as a cron expression."
  type        = string
  default     = "*/10 * * * *"
}

variable "tags" {
  description = "Labels or tags of all resources."
  type        = map(string)
  default     = {}
}
