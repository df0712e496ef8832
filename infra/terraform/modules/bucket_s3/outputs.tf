output "storage_path" {
  description = "Value for RunConfig(storage_path=...). With the region, which machines elsewhere need."
  value       = "s3://${aws_s3_bucket.runs.bucket}/${var.prefix}?region=${aws_s3_bucket.runs.region}"
}

output "policy_arn" {
  description = "Policy with read and write access to runs."
  value       = aws_iam_policy.runs.arn
}
