variable "name" {
  description = "Prefix of the names of all resources."
  type        = string
  default     = "spotfit"
}

variable "project" {
  description = "Project or subscription that is billed."
  type        = string
}

variable "region" {
  description = "Region of the sweepers."
  type        = string
}

variable "service_account" {
  description = "Email of the sweeper's service account; the agents' account has the required permissions."
  type        = string
}

variable "runs" {
  description = "Runs to sweep, by an arbitrary key: URL, and id of the Secret Manager secret with the run key."
  type = map(object({
    url        = string
    key_secret = string
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

variable "labels" {
  description = "Labels or tags of all resources."
  type        = map(string)
  default     = {}
}
