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
  description = "Where machines are."
  type        = string
}

variable "users" {
  description = "Who calls fit(), by a name of yours, as IAM writes them: user:…, group:…, serviceAccount:…."
  type        = map(string)
  default     = {}
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

variable "external_ip" {
  description = "Whether machines have public addresses; without them the network needs Private Google Access."
  type        = bool
  default     = true
}

variable "machine_type" {
  description = "As g2-standard-8; '' lets Batch choose by cores and memory."
  type        = string
  default     = ""
}

variable "accelerator" {
  description = "Type of GPUs that are attached, as nvidia-tesla-t4; '' for none, or for machine types with their own."
  type        = string
  default     = ""
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

variable "labels" {
  description = "On everything."
  type        = map(string)
  default     = {}
}
