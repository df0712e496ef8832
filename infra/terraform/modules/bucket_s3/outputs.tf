output "storage_path" {
  description = "Value for RunConfig(storage_path=...)."
  value       = "s3://${aws_s3_bucket.runs.bucket}/${var.prefix}"
}

output "policy_arn" {
  description = "Policy with read and write access to runs."
  value       = aws_iam_policy.runs.arn
}
