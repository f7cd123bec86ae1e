"""A stand-in for AWS on this machine: it takes what SDKs send, and answers as told."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# IAM, to which version 3 of the SDK turns about the role: the caller may not look.
_DENIED = b"<ErrorResponse><Error><Code>AccessDenied</Code><Message>no</Message></Error></ErrorResponse>"


@dataclass
class FakeService:
    """SageMaker, CloudWatch Logs, S3 and IAM behind one address.

    Attributes:
        refusals: Error codes for the next CreateTrainingJob requests; an empty one accepts.
        endings: What DescribeTrainingJob says of the jobs, in the order of their creation.
        lines: What is logged by host algo-1 of each job.
        requests: CreateTrainingJob requests so far.
        tuning: CreateHyperParameterTuningJob requests so far.
        uploads: Paths of S3 objects so far.
        seen: Everything that came, as method and path.
        operations: Names of the API calls among it.
    """

    refusals: list[str] = field(default_factory=list)
    endings: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    tuning: list[dict[str, Any]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
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
        """Variables with which an SDK finds this service, and nothing else on the network."""
        address = f"http://127.0.0.1:{self._server.server_port}"
        return {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            # What goes to any other host, such as telemetry, comes here too, and is seen.
            "HTTPS_PROXY": address,
            "HTTP_PROXY": address,
            "NO_PROXY": "127.0.0.1",
        }

    def answer(self, operation: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer the operations of SageMaker and CloudWatch Logs.

        Args:
            operation: Its name.
            body: Its arguments.
        """
        if operation == "CreateHyperParameterTuningJob":
            self.tuning.append(body)
            return 200, {"HyperParameterTuningJobArn": "arn:aws:x"}
        if operation == "FilterLogEvents":
            stream = f"{body['logStreamNamePrefix']}algo-1-1700000000"
            events = [
                {"logStreamName": stream, "timestamp": number, "message": line, "eventId": str(number)}
                for number, line in enumerate(self.lines)
            ]
            return 200, {"events": events}
        if operation == "CreateTrainingJob":
            self.requests.append(body)
            code = self.refusals.pop(0) if self.refusals else ""
            if code:
                return 400, {"__type": code, "message": "said the service"}
            return 200, {"TrainingJobArn": f"arn:aws:sagemaker:us-east-1:111122223333:training-job/{operation}"}
        if operation == "DescribeTrainingJob":
            created = [request["TrainingJobName"] for request in self.requests]
            ending = self.endings[created.index(body["TrainingJobName"])]
            return 200, {"TrainingJobName": body["TrainingJobName"], "TrainingJobArn": "arn:aws:x", **ending}
        return 400, {"__type": "UnknownOperation", "message": operation}


class _Handler(BaseHTTPRequestHandler):
    fake: FakeService
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        """Take an API call."""
        body = self._read()
        operation = self.headers.get("X-Amz-Target", "").partition(".")[2]
        if not operation:
            self._reply(403, _DENIED)
            return
        self.fake.operations.append(operation)
        status, content = self.fake.answer(operation, json.loads(body))
        self._reply(status, json.dumps(content).encode())

    def do_PUT(self) -> None:
        """Take an upload."""
        self._read()
        self.fake.uploads.append(self.path)
        self._reply(200, b"")

    def do_GET(self) -> None:
        """Know nothing."""
        self._read()
        self._reply(404, b"")

    do_HEAD = do_CONNECT = do_GET  # noqa: N815

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

    def _reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
