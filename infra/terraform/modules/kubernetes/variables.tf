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

  validation {
    condition     = contains(["", "eks", "karpenter", "gke", "aks"], var.flavour)
    error_message = "eks, karpenter, gke, aks or ''."
  }
}

variable "service_account" {
  description = "Name of the agents' service account."
  type        = string
  default     = "spotfit-agent"
}

variable "service_account_annotations" {
  description = "Annotations that bind it to a cloud identity with access to the bucket: `eks.amazonaws.com/role-arn`, `iam.gke.io/gcp-service-account` or `azure.workload.identity/client-id`."
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

variable "reads_nodes" {
  description = "Whether agents may read nodes, which announces a drained node before its pods are evicted."
  type        = bool
  default     = true
}

variable "labels" {
  description = "Labels or tags of all resources."
  type        = map(string)
  default     = {}
}
