output "schedules" {
  description = "One per run."
  value       = [for schedule in aws_scheduler_schedule.sweep : schedule.name]
}
