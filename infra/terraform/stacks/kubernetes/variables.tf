variable "context" {
  description = "Context of the kubeconfig; null is the current one."
  type        = string
  default     = null
}

variable "kubeconfig" {
  description = "Path of the kubeconfig."
  type        = string
  default     = "~/.kube/config"
}

variable "namespace" {
  description = "Namespace of the Jobs; it is created."
  type        = string
  default     = "spotfit"
}

variable "image" {
  description = "Container image with spotfit; `{python}` and `{torch}` are replaced by the caller's versions."
  type        = string
}

variable "flavour" {
  description = "Platform whose spot nodes are selected: eks, karpenter, gke or aks; '' selects none."
  type        = string
  default     = ""
}

variable "storage_path" {
  description = "Storage path of runs; agents need write access."
  type        = string
}

variable "service_account_annotations" {
  description = "Annotations that bind the agents' service account to a cloud identity with access to the bucket."
  type        = map(string)
  default     = {}
}

variable "pod_security" {
  description = "Pod Security Standard of the namespace: restricted, baseline or privileged."
  type        = string
  default     = "restricted"
}

variable "users" {
  description = "Names of users who call fit()."
  type        = list(string)
  default     = []
}

variable "groups" {
  description = "Names of groups who call fit()."
  type        = list(string)
  default     = []
}

variable "swept_runs" {
  description = "Runs of modules/sweeper_kubernetes."
  type = map(object({
    url        = string
    key_secret = string
    key_entry  = optional(string, "key")
  }))
  default = {}
}

variable "sweeper_image" {
  description = "Worker image of the sweeper, with a tag; required with swept_runs."
  type        = string
  default     = ""
}
