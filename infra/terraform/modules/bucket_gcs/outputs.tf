output "storage_path" {
  description = "For RunConfig(storage_path=...)."
  value       = "gs://${google_storage_bucket.runs.name}/${var.prefix}"
}
