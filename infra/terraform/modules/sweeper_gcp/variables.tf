variable "name" {
  description = "What everything here is called after."
  type        = string
  default     = "spotfit"
}

variable "project" {
  description = "Who pays."
  type        = string
}

variable "region" {
  description = "Where sweepers run."
  type        = string
}

variable "service_account" {
  description = "Email of who sweeps: the agents' account can do all that is needed."
  type        = string
}

variable "runs" {
  description = "Runs to look after, by a name of yours: each one's URL, and the id of the secret in Secret Manager that holds its key."
  type = map(object({
    url        = string
    key_secret = string
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
