# The journal uses conditional creates: objects must not be versioned, and no
# rule may delete any of them while the run is active.

resource "aws_s3_bucket" "runs" {
  bucket        = var.name
  force_destroy = var.deletable
  tags          = var.tags
}

resource "aws_s3_bucket_public_access_block" "runs" {
  bucket                  = aws_s3_bucket.runs.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_server_side_encryption_configuration" "runs" {
  bucket = aws_s3_bucket.runs.id

  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm = "AES256"
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "runs" {
  bucket = aws_s3_bucket.runs.id

  rule {
    id     = "incomplete-uploads"
    status = "Enabled"

    filter {
      prefix = ""
    }

    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }

  dynamic "rule" {
    for_each = var.expire_after_days > 0 ? [var.expire_after_days] : []

    content {
      id     = "old-runs"
      status = "Enabled"

      filter {
        prefix = "${var.prefix}/"
      }

      expiration {
        days = rule.value
      }
    }
  }
}

data "aws_iam_policy_document" "encrypted_only" {
  statement {
    sid       = "NothingInTheClear"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.runs.arn, "${aws_s3_bucket.runs.arn}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "runs" {
  bucket     = aws_s3_bucket.runs.id
  policy     = data.aws_iam_policy_document.encrypted_only.json
  depends_on = [aws_s3_bucket_public_access_block.runs]
}

# Permissions on the bucket, for agents and callers of fit().
data "aws_iam_policy_document" "runs" {
  statement {
    sid       = "FindRuns"
    actions   = ["s3:ListBucket", "s3:GetBucketLocation"]
    resources = [aws_s3_bucket.runs.arn]
  }

  statement {
    sid = "ReadAndWriteRuns"
    actions = [
      "s3:AbortMultipartUpload",
      "s3:DeleteObject",
      "s3:GetObject",
      "s3:ListMultipartUploadParts",
      "s3:PutObject",
    ]
    resources = ["${aws_s3_bucket.runs.arn}/${var.prefix}/*"]
  }
}

resource "aws_iam_policy" "runs" {
  name_prefix = "${substr(var.name, 0, 48)}-runs-"
  description = "Read and write spotfit's runs in ${var.name}."
  policy      = data.aws_iam_policy_document.runs.json
  tags        = var.tags
}
