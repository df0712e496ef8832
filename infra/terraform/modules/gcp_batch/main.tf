# Prerequisites of Google Cloud Batch for spot machines, with minimal permissions.

locals {
  apis = [
    "artifactregistry.googleapis.com",
    "batch.googleapis.com",
    "cloudbilling.googleapis.com", # public prices; no role is needed
    "compute.googleapis.com",
    "iam.googleapis.com",
    "logging.googleapis.com",
  ]

  registry = "${var.region}-docker.pkg.dev/${var.project}/${google_artifact_registry_repository.worker.repository_id}"
  baked    = "${local.registry}/worker:{spotfit}-py{python}-torch{torch}-${var.image_kind}"
  agents   = "serviceAccount:${google_service_account.agents.email}"
}

resource "google_project_service" "needed" {
  for_each = toset(local.apis)

  project            = var.project
  service            = each.key
  disable_on_destroy = false
}

# --- the image ------------------------------------------------------------------------------------

resource "google_artifact_registry_repository" "worker" {
  project       = var.project
  location      = var.region
  repository_id = var.name
  description   = "Worker images of spotfit."
  format        = "DOCKER"
  labels        = var.labels

  docker_config {
    immutable_tags = true
  }

  # Images of recent versions are kept; those of running jobs must not be among the others.
  cleanup_policies {
    id     = "old"
    action = "DELETE"

    condition {
      tag_state  = "ANY"
      older_than = "7776000s" # 90 days
    }
  }

  cleanup_policies {
    id     = "recent"
    action = "KEEP"

    most_recent_versions {
      keep_count = var.kept_images
    }
  }

  depends_on = [google_project_service.needed]
}

resource "google_artifact_registry_repository_iam_member" "agents" {
  project    = var.project
  location   = var.region
  repository = google_artifact_registry_repository.worker.name
  role       = "roles/artifactregistry.reader"
  member     = local.agents
}

# --- permissions ----------------------------------------------------------------------------------

resource "google_service_account" "agents" {
  project      = var.project
  account_id   = "${var.name}-agents"
  display_name = "Agents of spotfit"

  depends_on = [google_project_service.needed]
}

# Used by Batch's agent on each machine, and to submit replacements.
resource "google_project_iam_member" "agents" {
  for_each = toset(["roles/batch.agentReporter", "roles/batch.jobsEditor", "roles/logging.logWriter"])

  project = var.project
  role    = each.key
  member  = local.agents
}

# Callers and agents assign this account to new machines.
resource "google_service_account_iam_member" "given_to_machines" {
  for_each = merge({ agents = local.agents }, var.users)

  service_account_id = google_service_account.agents.name
  role               = "roles/iam.serviceAccountUser"
  member             = each.value
}

# They read the machines' output in Cloud Logging, which roles/batch.jobsEditor does not include.
resource "google_project_iam_member" "users" {
  for_each = {
    for grant in setproduct(keys(var.users), ["roles/batch.jobsEditor", "roles/logging.viewer"]) :
    "${grant[0]}-${grant[1]}" => { member = var.users[grant[0]], role = grant[1] }
  }

  project = var.project
  role    = each.value.role
  member  = each.value.member
}

# --- the network ----------------------------------------------------------------------------------

# Agents connect to each other on ephemeral ports; no other ingress is allowed.
resource "google_compute_firewall" "agents" {
  project                 = var.project
  name                    = "${var.name}-agents"
  description             = "Agents of spotfit connect to each other."
  network                 = var.network
  direction               = "INGRESS"
  source_service_accounts = [google_service_account.agents.email]
  target_service_accounts = [google_service_account.agents.email]

  allow {
    protocol = "tcp"
  }

  depends_on = [google_project_service.needed]
}
