# A CronJob per run that runs `spotfit sweep`, not on spot nodes.

resource "kubernetes_cron_job_v1" "sweep" {
  for_each = var.runs

  metadata {
    name      = "spotfit-sweep-${each.key}"
    namespace = var.namespace
    labels    = var.labels
  }

  spec {
    schedule                      = var.every
    concurrency_policy            = "Forbid"
    starting_deadline_seconds     = 120
    successful_jobs_history_limit = 1
    failed_jobs_history_limit     = 3

    job_template {
      metadata {
        labels = var.labels
      }

      spec {
        backoff_limit           = 0
        active_deadline_seconds = 600

        template {
          metadata {
            labels = var.labels
          }

          spec {
            service_account_name = var.service_account
            restart_policy       = "Never"

            security_context {
              run_as_non_root = true

              seccomp_profile {
                type = "RuntimeDefault"
              }
            }

            container {
              name    = "sweep"
              image   = var.image
              command = ["spotfit", "sweep", each.value.url]

              # As the Pod Security Standard 'restricted' requires.
              security_context {
                allow_privilege_escalation = false

                capabilities {
                  drop = ["ALL"]
                }
              }

              env {
                name = "SPOTFIT_RUN_SECRET"

                value_from {
                  secret_key_ref {
                    name = each.value.key_secret
                    key  = each.value.key_entry
                  }
                }
              }

              resources {
                requests = { cpu = "100m", memory = "512Mi" }
                limits   = { memory = "1Gi" }
              }
            }
          }
        }
      }
    }
  }
}
