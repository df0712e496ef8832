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
  description = "Where machines and the bucket are."
  type        = string
}

variable "bucket" {
  description = "Name of the bucket that is made for runs; unique in the world."
  type        = string
}

variable "users" {
  description = "Who calls fit(), by a name of yours, as IAM writes them: { me = \"user:me@example.com\" }."
  type        = map(string)
}

variable "network" {
  description = "Name of the network machines are in."
  type        = string
  default     = "default"
}

variable "subnetwork" {
  description = "Name of a subnetwork of the region; '' for networks that make theirs themselves."
  type        = string
  default     = ""
}

variable "machine_type" {
  description = "As g2-standard-8; '' lets Batch choose by cores and memory."
  type        = string
  default     = ""
}

variable "accelerator" {
  description = "Type of GPUs that are attached; '' for none, or for machine types with their own."
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
  description = "Runs that a schedule looks after, as modules/sweeper_gcp says; none: no sweeper is made."
  type = map(object({
    url        = string
    key_secret = string
  }))
  default = {}
}

variable "sweeper_image" {
  description = "The worker image that sweeps, with its tag; needed with swept_runs."
  type        = string
  default     = ""
}

variable "deletable" {
  description = "Whether `terraform destroy` may delete runs."
  type        = bool
  default     = false
}
