variable "name" {
  description = "What everything here is called after."
  type        = string
  default     = "spotfit"
}

variable "runs" {
  description = "Runs to look after, by a name of yours: each one's URL, and the ARN of the secret in Secrets Manager that holds its key."
  type = map(object({
    url            = string
    key_secret_arn = string
  }))
  default = {}
}

variable "every" {
  description = "How often, as EventBridge Scheduler says it."
  type        = string
  default     = "rate(10 minutes)"
}

variable "image" {
  description = "The worker image, with a tag: nothing is chosen by versions here."
  type        = string
}

variable "job_role" {
  description = "Who sweeps: `job_role` of modules/aws_batch will do."
  type        = string
}

variable "subnet_ids" {
  description = "Where the sweeper runs. It needs a way to S3, ECR, Secrets Manager and Batch."
  type        = list(string)
}

variable "security_group_ids" {
  description = "Groups that let it out."
  type        = list(string)
}

variable "public_ip" {
  description = "Whether it gets a public address: needed in subnets without NAT gateway or endpoints."
  type        = bool
  default     = true
}

variable "service_role" {
  description = "ARN of the role of Batch itself; '' is AWS's own, AWSServiceRoleForBatch."
  type        = string
  default     = ""
}

variable "tags" {
  description = "On everything."
  type        = map(string)
  default     = {}
}
