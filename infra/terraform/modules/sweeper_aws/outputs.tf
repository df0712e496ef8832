output "schedules" {
  description = "One for each run."
  value       = [for schedule in aws_scheduler_schedule.sweep : schedule.name]
}
