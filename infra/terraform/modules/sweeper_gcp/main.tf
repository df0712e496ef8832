# A schedule that runs `spotfit sweep` as jobs of Cloud Run.

locals {
  apis = [
    "cloudscheduler.googleapis.com",
    "iam.googleapis.com",
    "run.googleapis.com",
    "secretmanager.googleapis.com",
  ]

  called = "https://run.googleapis.com/v2/projects/${var.project}/locations/${var.region}/jobs"
}

resource "google_project_service" "needed" {
  for_each = toset(local.apis)

  project            = var.project
  service            = each.key
  disable_on_destroy = false
}

resource "google_cloud_run_v2_job" "sweep" {
  for_each = var.runs

  project             = var.project
  location            = var.region
  name                = "${var.name}-sweep-${each.key}"
  deletion_protection = false
  labels              = var.labels

  template {
    template {
      service_account = var.service_account
      max_retries     = 0
      timeout         = "600s"

      containers {
        image   = var.image
        command = ["spotfit", "sweep", each.value.url]

        env {
          name = "SPOTFIT_RUN_SECRET"

          value_source {
            secret_key_ref {
              secret  = each.value.key_secret
              version = "latest"
            }
          }
        }

        resources {
          limits = { cpu = "1", memory = "1Gi" }
        }
      }
    }
  }

  depends_on = [google_project_service.needed, google_secret_manager_secret_iam_member.keys]
}

resource "google_cloud_scheduler_job" "sweep" {
  for_each = var.runs

  project          = var.project
  region           = var.region
  name             = "${var.name}-sweep-${each.key}"
  description      = "Run spotfit sweep for ${each.value.url}."
  schedule         = var.every
  attempt_deadline = "60s"

  http_target {
    http_method = "POST"
    uri         = "${local.called}/${google_cloud_run_v2_job.sweep[each.key].name}:run"

    oauth_token {
      service_account_email = google_service_account.schedule.email
    }
  }

  depends_on = [google_project_service.needed]
}

# --- permissions ----------------------------------------------------------------------------------

# The sweeper may read only the keys of these runs.
resource "google_secret_manager_secret_iam_member" "keys" {
  for_each = var.runs

  project   = var.project
  secret_id = each.value.key_secret
  role      = "roles/secretmanager.secretAccessor"
  member    = "serviceAccount:${var.service_account}"
}

# The schedule may only start these jobs.
resource "google_service_account" "schedule" {
  project      = var.project
  account_id   = "${var.name}-schedule"
  display_name = "Schedule of spotfit's sweeper"

  depends_on = [google_project_service.needed]
}

resource "google_cloud_run_v2_job_iam_member" "schedule" {
  for_each = var.runs

  project  = var.project
  location = var.region
  name     = google_cloud_run_v2_job.sweep[each.key].name
  role     = "roles/run.invoker"
  member   = "serviceAccount:${google_service_account.schedule.email}"
}
