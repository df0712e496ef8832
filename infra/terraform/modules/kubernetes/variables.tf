variable "namespace" {
  description = "Where the machines' Jobs are; it is made."
  type        = string
  default     = "spotfit"
}

variable "image" {
  description = "Container image that holds spotfit; `{python}` and `{torch}` in it are the versions of whoever calls fit()."
  type        = string
}

variable "flavour" {
  description = "Whose spot nodes are chosen: eks, karpenter, gke or aks; '' chooses none."
  type        = string
  default     = ""

  validation {
    condition     = contains(["", "eks", "karpenter", "gke", "aks"], var.flavour)
    error_message = "eks, karpenter, gke, aks or nothing."
  }
}

variable "service_account" {
  description = "What the agents' service account is called."
  type        = string
  default     = "spotfit-agent"
}

variable "service_account_annotations" {
  description = "Which cloud identity it stands for, so that agents reach the bucket: `eks.amazonaws.com/role-arn`, `iam.gke.io/gcp-service-account` or `azure.workload.identity/client-id`."
  type        = map(string)
  default     = {}
}

variable "users" {
  description = "Who calls fit(): names of users."
  type        = list(string)
  default     = []
}

variable "groups" {
  description = "Who calls fit(): names of groups."
  type        = list(string)
  default     = []
}

variable "reads_nodes" {
  description = "Whether agents may read nodes: they hear of a drained node before their pods are evicted."
  type        = bool
  default     = true
}

variable "labels" {
  description = "On everything."
  type        = map(string)
  default     = {}
}
