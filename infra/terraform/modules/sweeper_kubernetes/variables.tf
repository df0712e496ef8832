variable "namespace" {
  description = "Namespace of modules/kubernetes."
  type        = string
}

variable "service_account" {
  description = "Service account of the sweeper; the agents' account has the required permissions."
  type        = string
}

variable "runs" {
  description = "Runs to sweep, by an arbitrary key: URL, and name and entry of the Secret with the run key."
  type = map(object({
    url        = string
    key_secret = string
    key_entry  = optional(string, "key")
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
