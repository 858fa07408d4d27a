"""Serve the viewer's page on this machine and follow the record as it grows.

Owns the server. Invariant: it answers this machine alone, under its own name alone (a page of
another site can't reach it by a name that it points here), and only reads.
"""

import json
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from agent_vllm.errors import EmptyRecordError
from agent_vllm.inspect.viewer.data import Report, read_report, to_json

_HOST = "127.0.0.1"
_SHARE_OF_TIME = 0.2  # that reading a growing record may take


class LiveReport:
    """The report of a file as it is now; read anew when the file has changed.

    Args:
        path: the record; it may not be there yet.
        limit: newest trajectories to show.

    Attributes:
        version: counts the readings.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.version = 0
        self._report = Report(name=path.name)
        self._read_state: tuple[int, int] | None = None
        self._next_s = 0.0
        self._lock = threading.Lock()

    def current(self) -> Report:
        """Raises ValueError where the file is no record, OSError where it can't be read."""
        with self._lock:
            state = self._file_state()
            if state != self._read_state and time.monotonic() >= self._next_s:
                start_s = time.monotonic()
                self._report = self._read()
                took_s = time.monotonic() - start_s
                self._next_s = start_s + took_s / _SHARE_OF_TIME
                self._read_state = state
                self.version += 1
            return self._report

    def _file_state(self) -> tuple[int, int] | None:
        if not self.path.exists():
            return None
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns

    def _read(self) -> Report:
        try:
            return read_report(self.path, self.limit)
        except (FileNotFoundError, EmptyRecordError):  # the run has not got there yet
            return Report(name=self.path.name)


def serve(path: Path, page: str, *, limit: int, port: int) -> None:
    """Serve until interrupted.

    Raises:
        OSError: the file or the port can't be had.
        ValueError: the file is no record of rollouts.
    """
    report = LiveReport(path, limit)
    report.current()
    with make_server(report, page, port) as server:
        print(f"http://{_HOST}:{server.server_port}/ follows {path}; Ctrl+C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)


def make_server(report: LiveReport, page: str, port: int) -> ThreadingHTTPServer:
    """A server that is bound and not yet running; port 0 takes a free one.

    Raises:
        OSError: the port is taken.
    """

    class Handler(_Handler):
        live_report = report
        page_bytes = page.encode("utf-8")

    try:
        return ThreadingHTTPServer((_HOST, port), Handler)
    except OSError as error:
        raise OSError(f"Port {port} can't be had: {error}. Choose another with --port.") from error


class _Handler(BaseHTTPRequestHandler):
    live_report: LiveReport
    page_bytes: bytes

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        port = self.connection.getsockname()[1]
        names = [f"{name}:{port}" for name in (_HOST, "localhost")]
        if self.headers.get("Host") not in names:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"Ask for 127.0.0.1.")
        elif url.path == "/":
            self._answer(HTTPStatus.OK, "text/html", self.page_bytes)
        elif url.path == "/index":
            self._index(query.get("version"))
        elif url.path == "/body":
            self._body(query.get("id", ""))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"Not here.")

    def _index(self, seen_version: str | None) -> None:
        """The index, or nothing new."""
        try:
            index = self.live_report.current().index
        except (OSError, ValueError) as error:
            self._answer(HTTPStatus.CONFLICT, "text/plain", str(error).encode("utf-8", "replace"))
            return
        if seen_version == str(self.live_report.version):
            self._answer(HTTPStatus.NO_CONTENT, "application/json", b"")
            return
        index = index | {"version": self.live_report.version}
        self._answer(HTTPStatus.OK, "application/json", to_json(index).encode("ascii"))

    def _body(self, trajectory_id: str) -> None:
        body = self.live_report.current().bodies.get(trajectory_id)
        if body is None:
            self._answer(HTTPStatus.NOT_FOUND, "application/json", json.dumps(None).encode())
        else:
            self._answer(HTTPStatus.OK, "application/json", body.encode("ascii"))

    def _answer(self, status: HTTPStatus, content_type: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not news."""
