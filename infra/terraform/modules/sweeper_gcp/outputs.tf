output "schedules" {
  description = "One for each run."
  value       = [for job in google_cloud_scheduler_job.sweep : job.name]
}
