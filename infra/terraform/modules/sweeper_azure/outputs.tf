output "schedules" {
  description = "One per run."
  value       = [for job in azurerm_container_app_job.sweep : job.name]
}
