variable "name" {
  description = "Prefix of the names of all resources."
  type        = string
  default     = "spotfit"
}

variable "runs" {
  description = "Runs to sweep, by an arbitrary key: URL, and ARN of the Secrets Manager secret with the run key."
  type = map(object({
    url            = string
    key_secret_arn = string
  }))
  default = {}
}

variable "every" {
  description = "Schedule, as an EventBridge Scheduler expression."
  type        = string
  default     = "rate(10 minutes)"
}

variable "image" {
  description = "Worker image with a tag; placeholders are not replaced."
  type        = string
}

variable "job_role" {
  description = "Role of the sweeper; `job_role` of modules/aws_batch has the required permissions."
  type        = string
}

variable "subnet_ids" {
  description = "Subnets of the sweeper, with routes to S3, ECR, Secrets Manager and Batch."
  type        = list(string)
}

variable "security_group_ids" {
  description = "Security groups with egress."
  type        = list(string)
}

variable "public_ip" {
  description = "Whether it has a public address; required in subnets without NAT gateway or endpoints."
  type        = bool
  default     = true
}

variable "service_role" {
  description = "ARN of the service role of Batch; '' is AWSServiceRoleForBatch."
  type        = string
  default     = ""
}

variable "tags" {
  description = "Labels or tags of all resources."
  type        = map(string)
  default     = {}
}
