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
  description = "Region of machines and bucket."
  type        = string
}

variable "bucket" {
  description = "Globally unique name of the bucket that is created for runs."
  type        = string
}

variable "users" {
  description = "Callers of fit(), by an arbitrary key: { me = \"user:me@example.com\" }."
  type        = map(string)
}

variable "network" {
  description = "Name of the machines' network."
  type        = string
  default     = "default"
}

variable "subnetwork" {
  description = "Name of a subnetwork of the region; '' for networks in auto mode."
  type        = string
  default     = ""
}

variable "machine_type" {
  description = "Machine type, for example g2-standard-8; '' lets Batch choose by cores and memory."
  type        = string
  default     = ""
}

variable "accelerator" {
  description = "Type of attached GPUs; '' for none and for machine types with built-in GPUs."
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
  description = "Runs of modules/sweeper_gcp; empty: no sweeper is created."
  type = map(object({
    url        = string
    key_secret = string
  }))
  default = {}
}

variable "sweeper_image" {
  description = "Worker image of the sweeper, with a tag; required with swept_runs."
  type        = string
  default     = ""
}

variable "deletable" {
  description = "Whether `terraform destroy` may delete runs."
  type        = bool
  default     = false
}
