output "storage_path" {
  description = "For RunConfig(storage_path=...)."
  value       = "s3://${aws_s3_bucket.runs.bucket}/${var.prefix}"
}

output "policy_arn" {
  description = "Lets whoever has it read and write runs."
  value       = aws_iam_policy.runs.arn
}
