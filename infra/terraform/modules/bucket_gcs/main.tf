# The journal uses conditional creates: objects must not be versioned, and no
# rule may delete any of them while the run is active.

resource "google_storage_bucket" "runs" {
  name                        = var.name
  project                     = var.project
  location                    = var.location
  storage_class               = "STANDARD"
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
  force_destroy               = var.deletable
  labels                      = var.labels

  # Soft delete would bill deleted checkpoints for another week.
  soft_delete_policy {
    retention_duration_seconds = 0
  }

  lifecycle_rule {
    condition {
      age = 7
    }

    action {
      type = "AbortIncompleteMultipartUpload"
    }
  }

  dynamic "lifecycle_rule" {
    for_each = var.expire_after_days > 0 ? [var.expire_after_days] : []

    content {
      condition {
        age            = lifecycle_rule.value
        matches_prefix = ["${var.prefix}/"]
      }

      action {
        type = "Delete"
      }
    }
  }
}

resource "google_storage_bucket_iam_member" "runs" {
  for_each = var.members

  bucket = google_storage_bucket.runs.name
  role   = "roles/storage.objectUser"
  member = each.value
}
