variable "namespace" {
  description = "That of modules/kubernetes."
  type        = string
}

variable "service_account" {
  description = "Who sweeps: the agents' service account can do all that is needed."
  type        = string
}

variable "runs" {
  description = "Runs to look after, by a name of yours: each one's URL, and the Secret of the namespace, with the entry in it, that holds its key."
  type = map(object({
    url        = string
    key_secret = string
    key_entry  = optional(string, "key")
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

variable "labels" {
  description = "On everything."
  type        = map(string)
  default     = {}
}
