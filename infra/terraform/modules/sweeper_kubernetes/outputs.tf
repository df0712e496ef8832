output "schedules" {
  description = "One per run."
  value       = [for job in kubernetes_cron_job_v1.sweep : job.metadata[0].name]
}
