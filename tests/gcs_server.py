"""Google Cloud Storage: the part of its XML API that stores use, with object generations.

`python -m tests.gcs_server` serves until its input ends; its first line of output is its address.
Preconditions work as documented by Google, unlike in the emulator on PyPI:
https://docs.cloud.google.com/storage/docs/xml-api/reference-headers#xgoogifgenerationmatch,
https://docs.cloud.google.com/storage/docs/xml-api/get-bucket-list,
https://docs.cloud.google.com/storage/docs/multipart-uploads.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from spotfit_localsim.clouds.http_server import WireRequest, WireResponse, WireServer

_MAX_KEYS = 1000


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One generation of an object."""

    body: bytes
    generation: int
    at: datetime

    @property
    def headers(self) -> dict[str, str]:
        return {
            "etag": self.etag,
            "last-modified": format_datetime(self.at, usegmt=True),
            "x-goog-generation": str(self.generation),
            "accept-ranges": "bytes",
        }

    @property
    def etag(self) -> str:
        """The ETag of the content, as for objects uploaded in one request."""
        return f'"{hashlib.md5(self.body, usedforsecurity=False).hexdigest()}"'


@dataclass
class GcsBucket:
    """The objects and uploads. Requests are serialized by the server."""

    objects: dict[str, StoredObject] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    _generations: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def answer(self, request: WireRequest) -> WireResponse:
        _, _, rest = request.path.partition("/")
        _, _, key = rest.partition("/")
        if not key:
            return self._list(request.query)
        match request.method:
            case "PUT" if "uploadId" in request.query:
                return self._part(request)
            case "PUT":
                return self._put(key, request.body, request.headers)
            case "POST" if "uploads" in request.query:
                return self._begin()
            case "POST":
                return self._complete(key, request)
            case "GET" | "HEAD":
                return self._get(key, request)
            case "DELETE" if "uploadId" in request.query:
                return WireResponse(
                    204 if self.uploads.pop(request.query["uploadId"], None) else 404
                )
            case "DELETE":
                return WireResponse(204) if self.objects.pop(key, None) else _missing()
        return WireResponse(405)

    def _put(self, key: str, body: bytes, headers: Mapping[str, str]) -> WireResponse:
        wanted = headers.get("x-goog-if-generation-match")
        there = self.objects.get(key)
        if wanted is not None and int(wanted) != (there.generation if there else 0):
            return _error(412, "PreconditionFailed")
        stored = StoredObject(body, next(self._generations), datetime.now(UTC))
        self.objects[key] = stored
        return WireResponse(200, b"", stored.headers)

    def _get(self, key: str, request: WireRequest) -> WireResponse:
        stored = self.objects.get(key)
        if stored is None:
            return _missing()
        if request.headers.get("if-match", stored.etag) != stored.etag:
            return _error(412, "PreconditionFailed")
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if wanted is None:
            return WireResponse(200, stored.body, stored.headers)
        first, size = int(wanted[1]), len(stored.body)
        if first >= size:
            return _error(416, "InvalidRange")
        last = min(int(wanted[2] or size), size - 1)
        range_header = {"content-range": f"bytes {first}-{last}/{size}"}
        return WireResponse(206, stored.body[first : last + 1], stored.headers | range_header)

    def _list(self, query: Mapping[str, str]) -> WireResponse:
        """List in UTF-8 order, paginated."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        keys = sorted((key for key in self.objects if key.startswith(prefix)), key=str.encode)
        entries_by_name: dict[str, str] = {}
        for key in keys:
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            name = f"{prefix}{head}{delimiter}" if found else key
            if name.encode() > after.encode() or not after:
                entries_by_name.setdefault(
                    name, _prefix(name) if found else _entry(key, self.objects[key])
                )
        most = min(int(query.get("max-keys", _MAX_KEYS)), _MAX_KEYS)
        page = list(entries_by_name)[:most]
        more = len(entries_by_name) > len(page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        entries = "".join(entries_by_name[name] for name in page)
        cut = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        return _xml(f"<ListBucketResult>{cut}{token}{entries}</ListBucketResult>")

    # --- multipart uploads --------------------------------------------------------------------

    def _begin(self) -> WireResponse:
        name = f"upload-{next(self._generations)}"
        self.uploads[name] = {}
        upload_id = f"<UploadId>{name}</UploadId>"
        return _xml(f"<InitiateMultipartUploadResult>{upload_id}</InitiateMultipartUploadResult>")

    def _part(self, request: WireRequest) -> WireResponse:
        parts = self.uploads.get(request.query["uploadId"])
        if parts is None:
            return _error(404, "NoSuchUpload")
        parts[int(request.query["partNumber"])] = request.body
        digest = hashlib.md5(request.body, usedforsecurity=False).hexdigest()
        return WireResponse(200, b"", {"etag": f'"{digest}"'})

    def _complete(self, key: str, request: WireRequest) -> WireResponse:
        parts = self.uploads.get(request.query["uploadId"])
        if parts is None:
            return _error(404, "NoSuchUpload")
        root = ElementTree.fromstring(request.body)  # noqa: S314  # input of our driver
        wanted = [int(one.text or "") for one in root.iter() if one.tag.endswith("PartNumber")]
        body = b"".join(parts[number] for number in wanted)
        reply = self._put(key, body, request.headers)
        if reply.status != 200:
            return reply
        del self.uploads[request.query["uploadId"]]
        etag = escape(self.objects[key].etag)
        result = f"<Key>{escape(key)}</Key><ETag>{etag}</ETag>"
        return _xml(f"<CompleteMultipartUploadResult>{result}</CompleteMultipartUploadResult>")


def _entry(key: str, stored: StoredObject) -> str:
    return (
        f"<Contents><Key>{escape(key)}</Key><Size>{len(stored.body)}</Size>"
        f"<LastModified>{stored.at.isoformat().replace('+00:00', 'Z')}</LastModified>"
        f"<ETag>{escape(stored.etag)}</ETag></Contents>"
    )


def _prefix(name: str) -> str:
    return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"


def _missing() -> WireResponse:
    return _error(404, "NoSuchKey")


def _error(status: int, code: str) -> WireResponse:
    body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code></Error>"
    return WireResponse(status, body.encode(), {"content-type": "application/xml"})


def _xml(text: str) -> WireResponse:
    body = f"<?xml version='1.0' encoding='UTF-8'?>{text}"
    return WireResponse(200, body.encode(), {"content-type": "application/xml"})


def service_account_key(url: str) -> str:
    """A service account key whose token endpoint is this server."""
    return json.dumps(
        {
            "gcs_base_url": url,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
    )


if __name__ == "__main__":
    server = WireServer(GcsBucket().answer)
    print(server.url, flush=True)
    sys.stdin.read()
    server.close()
