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
  description = "Region of the machines."
  type        = string
}

variable "users" {
  description = "Callers of fit(), by an arbitrary key: user:…, group:…, serviceAccount:…."
  type        = map(string)
  default     = {}
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

variable "external_ip" {
  description = "Whether machines have public addresses; without them the network needs Private Google Access."
  type        = bool
  default     = true
}

variable "machine_type" {
  description = "Machine type, for example g2-standard-8; '' lets Batch choose by cores and memory."
  type        = string
  default     = ""
}

variable "accelerator" {
  description = "Type of attached GPUs, for example nvidia-tesla-t4; '' for none and for machine types with built-in GPUs."
  type        = string
  default     = ""
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

variable "kept_images" {
  description = "Number of images that the registry keeps, however old they are."
  type        = number
  default     = 30
}

variable "labels" {
  description = "Labels or tags of all resources."
  type        = map(string)
  default     = {}
}
