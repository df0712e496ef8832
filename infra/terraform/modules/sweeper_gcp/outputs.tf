output "schedules" {
  description = "One per run."
  value       = [for job in google_cloud_scheduler_job.sweep : job.name]
}
