"""A stand-in for AWS on this machine, which answers boto3 and the SDKs as a test configures it."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, quote

# Answers of STS, S3 and IAM, which the SDKs ask for the account, the buckets and the role. By default, the caller has
# no permission to read roles.
_IDENTITY = (
    b"<GetCallerIdentityResponse><GetCallerIdentityResult><Account>111122223333</Account></GetCallerIdentityResult>"
    b"</GetCallerIdentityResponse>"
)
_REGION = "x-amz-bucket-region"
_TOKEN = base64.b64encode(b"AWS:a password").decode()
_NO_BUCKETS = b"<ListAllMyBucketsResult><Buckets></Buckets></ListAllMyBucketsResult>"
_DENIED = b"<ErrorResponse><Error><Code>AccessDenied</Code><Message>no</Message></Error></ErrorResponse>"
_INVALID = _DENIED.replace(b"AccessDenied", b"InvalidClientTokenId")


def process_environment(account: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment, with an account's variables in place of its own for AWS and the SDKs."""
    own = {name: value for name, value in os.environ.items() if not name.upper().startswith(("AWS", "SAGEMAKER"))}
    return {**own, **account}


@dataclass
class FakeService:
    """SageMaker, CloudWatch Logs, S3 and IAM behind one address.

    Attributes:
        refusals: Error codes for the next CreateTrainingJob requests; an empty code accepts the request.
        endings: Answers of DescribeTrainingJob, one per job in order of creation.
        lines: Log lines of host algo-1 of each job; None if the caller has no permission to read logs.
        requests: CreateTrainingJob requests so far.
        tuning: CreateHyperParameterTuningJob requests so far.
        uploads: Paths of the S3 objects uploaded so far.
        objects: Contents of the S3 objects by path, /bucket/key.
        tags: Answer of ListTags for every job.
        lost: Number of answers to CreateTrainingJob to lose: the job is created, but the connection is closed.
        foreign: Paths of the buckets that belong to another account.
        has_valid_key: Whether the caller's credentials are accepted.
        buckets: Regions of the existing buckets, by path.
        role: Trust policy of the only role, "training"; None if the caller has no permission to read roles.
        repositories: Names of the image repositories.
        images: Tags and digests in every repository; None if the caller has no permission to read images.
        quotas: Values of quotas by name; None if the caller has no permission to read quotas.
        prices: Hourly prices of training hosts by instance type; None if the caller has no permission to read prices.
        seen: Method and path of each request.
        operations: Names of the API calls.
    """

    refusals: list[str] = field(default_factory=list)
    endings: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] | None = field(default_factory=list)
    tuning: list[dict[str, Any]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    tags: list[dict[str, str]] = field(default_factory=list)
    lost: int = 0
    foreign: list[str] = field(default_factory=list)
    has_valid_key: bool = True
    buckets: dict[str, str] = field(default_factory=lambda: {"/bucket": "us-east-1"})
    role: dict[str, Any] | None = None
    repositories: list[str] = field(default_factory=lambda: ["lightning-sm"])
    images: list[str] | None = None
    quotas: dict[str, float] | None = None
    prices: dict[str, float] | None = None
    seen: list[str] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)

    def __enter__(self) -> FakeService:
        service = self

        class Handler(_Handler):
            fake = service

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which an SDK reaches this service, and nothing else on the network."""
        address = f"http://127.0.0.1:{self._server.server_port}"
        return {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            # Requests to any other host, such as telemetry, arrive here, too, and are recorded in ``seen``.
            "HTTPS_PROXY": address,
            "HTTP_PROXY": address,
            "NO_PROXY": "127.0.0.1",
        }

    def answer(self, operation: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer an operation of a service with a JSON API, such as SageMaker or CloudWatch Logs.

        Args:
            operation: Name of the operation.
            body: Arguments of the operation.
        """
        if operation == "CreateHyperParameterTuningJob":
            self.tuning.append(body)
            return 200, {"HyperParameterTuningJobArn": "arn:aws:x"}
        answers = {
            "CreateTrainingJob": self._create,
            "DescribeTrainingJob": self._describe,
            "CreateRepository": self._create_repository,
            "DescribeImages": self._images,
            "DescribeRepositories": self._repositories,
            "GetAuthorizationToken": lambda _: (200, {"authorizationData": [{"authorizationToken": _TOKEN}]}),
            "FilterLogEvents": self._log,
            "GetProducts": self._products,
            "ListServiceQuotas": self._quotas,
            "ListTags": lambda _: (200, {"Tags": self.tags}),
            "ListTrainingJobs": lambda _: (200, {"TrainingJobSummaries": []}),
        }
        if operation in answers:
            return answers[operation](body)
        return 400, {"__type": "UnknownOperation", "message": operation}

    def _images(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.images is None:
            return 400, {"__type": "AccessDeniedException", "message": "no"}
        if body["repositoryName"] not in self.repositories:
            return 400, {"__type": "RepositoryNotFoundException", "message": "no"}
        (wanted,) = body["imageIds"][0].values()
        if wanted not in self.images:
            return 400, {"__type": "ImageNotFoundException", "message": "no"}
        return 200, {"imageDetails": [{}]}

    def _repositories(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["repositoryNames"][0] not in self.repositories:
            return 400, {"__type": "RepositoryNotFoundException", "message": "no"}
        return 200, {"repositories": [{}]}

    def _create_repository(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.repositories.append(body["repositoryName"])
        return 200, {"repository": {}}

    def _quotas(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return one quota per page, because the service spreads its many quotas over pages."""
        if self.quotas is None:
            return 400, {"__type": "AccessDeniedException", "message": "no"}
        names = list(self.quotas)
        number = int(body.get("NextToken", "0"))
        more = {"NextToken": str(number + 1)} if number + 1 < len(names) else {}
        return 200, {"Quotas": [{"QuotaName": name, "Value": self.quotas[name]} for name in names[number:][:1]], **more}

    def _products(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.prices is None:
            return 400, {"__type": "AccessDeniedException", "message": "no"}
        wanted = {term["Field"]: term["Value"] for term in body["Filters"]}["instanceName"]
        dimension = {"unit": "Hrs", "pricePerUnit": {"USD": str(self.prices.get(wanted, ""))}}
        product = {
            "product": {"attributes": {"usagetype": f"USE1-Train:{wanted}"}},
            "terms": {"OnDemand": {"X.Y": {"priceDimensions": {"X.Y.Z": dimension}}}},
        }
        return 200, {"PriceList": [json.dumps(product)] if wanted in self.prices else []}

    def role_answer(self, name: str) -> tuple[int, bytes]:
        """Answer IAM's GetRole.

        Args:
            name: Name of the role.
        """
        if self.role is None:
            return 403, _DENIED
        if name != "training":
            return 404, _DENIED.replace(b"AccessDenied", b"NoSuchEntity")
        policy = quote(json.dumps(self.role))
        arn = f"arn:aws:iam::111122223333:role/{name}"
        role = f"<Arn>{arn}</Arn><AssumeRolePolicyDocument>{policy}</AssumeRolePolicyDocument>"
        return 200, f"<GetRoleResponse><GetRoleResult><Role>{role}</Role></GetRoleResult></GetRoleResponse>".encode()

    def _log(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.lines is None:
            return 400, {"__type": "AccessDeniedException", "message": "no"}
        stream = f"{body['logStreamNamePrefix']}algo-1-1700000000"
        events = [
            {"logStreamName": stream, "timestamp": number, "message": line, "eventId": str(number)}
            for number, line in enumerate(self.lines)
        ]
        return 200, {"events": events}

    def _describe(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        created = [request["TrainingJobName"] for request in self.requests]
        if body["TrainingJobName"] not in created:
            return 400, {"__type": "ValidationException", "message": "Requested resource not found."}
        number = created.index(body["TrainingJobName"])
        described = {"TrainingJobArn": "arn:aws:x", **self.requests[number], **self.endings[number]}
        return 200, {name: value for name, value in described.items() if name != "Tags"}

    def _create(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Create a training job, and return the status 0 if the answer is to be lost."""
        if body["TrainingJobName"] in [request["TrainingJobName"] for request in self.requests]:
            return 400, {"__type": "ResourceInUse", "message": "the name is in use"}
        self.requests.append(body)
        if self.lost:
            self.lost -= 1
            return 0, {}
        code = self.refusals.pop(0) if self.refusals else ""
        if code:
            return 400, {"__type": code, "message": "said the service"}
        name = body["TrainingJobName"]
        return 200, {"TrainingJobArn": f"arn:aws:sagemaker:us-east-1:111122223333:training-job/{name}"}


class _Handler(BaseHTTPRequestHandler):
    fake: FakeService
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_POST(self) -> None:
        """Answer an API call."""
        body = self._read()
        operation = self.headers.get("X-Amz-Target", "").partition(".")[2]
        if not operation:
            query = parse_qs(body.decode())
            action = query.get("Action", [""])[0]
            if action == "GetCallerIdentity":
                self._reply(*((200, _IDENTITY) if self.fake.has_valid_key else (403, _INVALID)))
            else:
                self._reply(*(self.fake.role_answer(query["RoleName"][0]) if action == "GetRole" else (403, _DENIED)))
            return
        self.fake.operations.append(operation)
        status, content = self.fake.answer(operation, json.loads(body))
        if not status:
            self.close_connection = True
            return
        self._reply(status, json.dumps(content).encode())

    def do_PUT(self) -> None:
        """Store an upload, or create a bucket."""
        content = self._read()
        self.fake.objects[self.path] = content
        if self.path.count("/") > 1:
            self.fake.uploads.append(self.path)
        self._reply(200, b"")

    def do_HEAD(self) -> None:
        """Report whether a bucket or an object exists."""
        self._read()
        region = self.fake.buckets.get(self.path)
        is_known = region is not None or self.path in self.fake.objects
        status = 403 if self.path in self.fake.foreign else 200 if is_known else 404
        self._reply(status, self.fake.objects.get(self.path, b""), {} if region is None else {_REGION: region})

    def do_GET(self) -> None:
        """Return an empty list of buckets, a list of objects, or an object."""
        self._read()
        path, _, query = self.path.partition("?")
        options = parse_qs(query)
        if path == "/":
            self._reply(200, _NO_BUCKETS)
        elif "list-type" in options:
            start = f"{path.rstrip('/')}/{options['prefix'][0]}"
            keys = [path.split("/", 2)[2] for path in sorted(self.fake.objects) if path.startswith(start)]
            listed = "".join(f"<Contents><Key>{quote(key)}</Key></Contents>" for key in keys)
            self._reply(200, f"<ListBucketResult>{listed}</ListBucketResult>".encode())
        elif path in self.fake.objects:
            self._reply(200, self.fake.objects[path])
        else:
            self._reply(404, b"")

    def do_CONNECT(self) -> None:
        """Refuse to act as a proxy."""
        self._read()
        self._reply(404, b"")

    def _read(self) -> bytes:
        self.fake.seen.append(f"{self.command} {self.path}")
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return content
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _reply(self, status: int, content: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", '"0"')
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
