output "schedules" {
  description = "One for each run."
  value       = [for job in azurerm_container_app_job.sweep : job.name]
}
