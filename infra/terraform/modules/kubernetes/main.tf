# A namespace for the machines of runs, with minimal permissions.

locals {
  labels = merge({ "app.kubernetes.io/name" = "spotfit" }, var.labels)
}

# The standard rejects pods that could take over their node. Those of spotfit satisfy 'restricted', unless
# KubernetesOptions(pod_template=…) adds, for example, the capability IPC_LOCK for RDMA.
resource "kubernetes_namespace_v1" "runs" {
  metadata {
    name   = var.namespace
    labels = merge(local.labels, { "pod-security.kubernetes.io/enforce" = var.pod_security })
  }
}

resource "kubernetes_service_account_v1" "agents" {
  metadata {
    name        = var.service_account
    namespace   = kubernetes_namespace_v1.runs.metadata[0].name
    labels      = local.labels
    annotations = var.service_account_annotations
  }
}

# The controller: the process that submits machine groups, an agent or the caller of fit().
resource "kubernetes_role_v1" "controller" {
  metadata {
    name      = "spotfit-controller"
    namespace = kubernetes_namespace_v1.runs.metadata[0].name
    labels    = local.labels
  }

  rule {
    api_groups = ["batch"]
    resources  = ["jobs"]
    verbs      = ["create", "get", "delete"]
  }

  rule {
    api_groups = [""]
    resources  = ["pods", "events"]
    verbs      = ["list"]
  }

  rule {
    api_groups = [""]
    resources  = ["secrets"]
    verbs      = ["create", "patch", "delete"]
  }

  rule {
    api_groups = [""]
    resources  = ["services"]
    verbs      = ["create", "patch", "delete"]
  }

  rule {
    api_groups = [""]
    resources  = ["pods/log"]
    verbs      = ["get"]
  }
}

resource "kubernetes_role_binding_v1" "controller" {
  metadata {
    name      = "spotfit-controller"
    namespace = kubernetes_namespace_v1.runs.metadata[0].name
    labels    = local.labels
  }

  role_ref {
    api_group = "rbac.authorization.k8s.io"
    kind      = "Role"
    name      = kubernetes_role_v1.controller.metadata[0].name
  }

  subject {
    kind      = "ServiceAccount"
    name      = kubernetes_service_account_v1.agents.metadata[0].name
    namespace = kubernetes_namespace_v1.runs.metadata[0].name
  }

  dynamic "subject" {
    for_each = var.users

    content {
      kind      = "User"
      name      = subject.value
      api_group = "rbac.authorization.k8s.io"
    }
  }

  dynamic "subject" {
    for_each = var.groups

    content {
      kind      = "Group"
      name      = subject.value
      api_group = "rbac.authorization.k8s.io"
    }
  }
}

# Nodes are not namespaced; agents read their own.
resource "kubernetes_cluster_role_v1" "node_reader" {
  count = var.reads_nodes ? 1 : 0

  metadata {
    name   = "${var.namespace}-node-reader"
    labels = local.labels
  }

  rule {
    api_groups = [""]
    resources  = ["nodes"]
    verbs      = ["get"]
  }
}

resource "kubernetes_cluster_role_binding_v1" "node_reader" {
  count = var.reads_nodes ? 1 : 0

  metadata {
    name   = "${var.namespace}-node-reader"
    labels = local.labels
  }

  role_ref {
    api_group = "rbac.authorization.k8s.io"
    kind      = "ClusterRole"
    name      = kubernetes_cluster_role_v1.node_reader[0].metadata[0].name
  }

  subject {
    kind      = "ServiceAccount"
    name      = kubernetes_service_account_v1.agents.metadata[0].name
    namespace = kubernetes_namespace_v1.runs.metadata[0].name
  }
}
