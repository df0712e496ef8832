output "storage_path" {
  description = "Value for RunConfig(storage_path=...)."
  value       = "gs://${google_storage_bucket.runs.name}/${var.prefix}"
}
