variable "context" {
  description = "Of the kubeconfig; null is the current one."
  type        = string
  default     = null
}

variable "kubeconfig" {
  description = "The kubeconfig."
  type        = string
  default     = "~/.kube/config"
}

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
}

variable "storage_path" {
  description = "Where runs lie: a bucket that agents may write to."
  type        = string
}

variable "service_account_annotations" {
  description = "Which cloud identity the agents' service account stands for, so that they reach the bucket."
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

variable "swept_runs" {
  description = "Runs that a CronJob looks after, as modules/sweeper_kubernetes says."
  type = map(object({
    url        = string
    key_secret = string
    key_entry  = optional(string, "key")
  }))
  default = {}
}

variable "sweeper_image" {
  description = "The worker image that sweeps, with its tag; needed with swept_runs."
  type        = string
  default     = ""
}
