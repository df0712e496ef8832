"""The region of an S3 bucket, which requests to S3 must be signed for.

`fit()` writes it into the URL that machines open: the environment of a machine may name another
region, as that of a queue elsewhere, or none. GCS and Azure need no region: their requests are
authorized by a token or by a signature of the account.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from email.message import Message
from typing import Any
from urllib.parse import quote

from spotfit.host import env, log
from spotfit.store.clients import S3_ENDPOINT_VARIABLES
from spotfit.store.url import RootUrl

_REGION_HEADER = "x-amz-bucket-region"
_TIMEOUT_S = 5.0
_REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")
# Partitions other than the standard one have own endpoints, which know their own buckets only:
# https://docs.aws.amazon.com/general/latest/gr/s3.html
_PARTITION_SUFFIXES = {"cn-": "amazonaws.com.cn", "us-gov-": "amazonaws.com"}


def resolve_region(root: RootUrl) -> str:
    """Return the region of the bucket, such as "eu-west-1"; '' if it is not needed or unknown.

    Sends one HEAD request without credentials, with a timeout of 5 s. S3 answers it "on any bucket
    name to any Region in the partition, and regardless of the permissions on the bucket" with the
    region (https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadBucket.html). Without a request:
    '' for other storages than S3, and for a URL that names an endpoint or a region. An endpoint of
    the environment is asked instead of that of AWS. Never raises: an error is logged.
    """
    if root.scheme != "s3" or root.endpoint or root.region:
        return ""
    # Path style: the name of a bucket may contain dots, which no certificate covers.
    url = f"{_endpoint()}/{quote(root.bucket)}"
    try:
        return _fetch_headers(url).get(_REGION_HEADER) or ""
    except (OSError, ValueError) as error:  # also URLError, and an invalid endpoint
        log.warning("store.region_unknown", bucket=root.bucket, reason=str(error))
        return ""


def _endpoint() -> str:
    if configured := next(filter(None, map(env.lookup, S3_ENDPOINT_VARIABLES)), ""):
        return configured.rstrip("/")
    region = next(filter(None, map(env.lookup, _REGION_VARIABLES)), "")
    for prefix, suffix in _PARTITION_SUFFIXES.items():
        if region.startswith(prefix):
            return f"https://s3.{region}.{suffix}"
    return "https://s3.amazonaws.com"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Raises `HTTPError` for a redirect: its headers have the region, too."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _fetch_headers(url: str) -> Message:
    request = urllib.request.Request(url, method="HEAD")  # noqa: S310  # http is a user's endpoint
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            headers: Message = response.headers
            return headers
    except urllib.error.HTTPError as refused:  # 301, 400 and 403 have the header as well
        with refused:
            return refused.headers
