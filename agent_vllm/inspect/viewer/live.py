"""Show the viewer's page on this machine and follow the record as it grows.

Invariant: the server only reads, answers only this machine, and only under its own name, so that a
page of another site can't reach it through a name that points here.
"""

import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from agent_vllm.errors import EmptyRecordError
from agent_vllm.inspect.viewer.data import PageData, read_page_data, to_json
from agent_vllm.inspect.viewer.page import page_html

_HOST = "127.0.0.1"
_READING_SHARE = 0.2  # of the time, at most, while the record grows


class LiveData:
    """Read a record again whenever its file has changed.

    Args:
        path: the record; it may not exist yet.
        limit: newest trajectories to show.

    Attributes:
        version: names the state of the file that was read last.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.version = ""
        self._data = PageData(name=path.name)
        self._next_s = 0.0
        self._lock = threading.Lock()

    def current(self) -> PageData:
        """Return the data. Raises ValueError if the file is not a record, OSError if unreadable."""
        with self._lock:
            start_s = time.monotonic()
            if start_s >= self._next_s and self.path.exists():
                status = self.path.stat()
                version = f"{status.st_size}-{status.st_mtime_ns}"
                if version != self.version:
                    self._data = self._read()
                    self._next_s = start_s + (time.monotonic() - start_s) / _READING_SHARE
                    self.version = version
            return self._data

    def _read(self) -> PageData:
        try:
            return read_page_data(self.path, self.limit)
        except EmptyRecordError:  # nothing was recorded yet
            return PageData(name=self.path.name)


def follow(path: Path, *, limit: int, port: int) -> None:
    """Serve the page of a record until interrupted.

    Raises:
        OSError: the file can't be read, or the port is taken.
        ValueError: the file is not a record of rollouts.
    """
    data = LiveData(path, limit)
    data.current()
    with make_server(data, port) as server:
        print(f"http://{_HOST}:{server.server_port}/ follows {path}; Ctrl+C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)


def make_server(data: LiveData, port: int) -> ThreadingHTTPServer:
    """Return a bound server that is not running yet; port 0 takes a free one.

    Raises:
        OSError: the port is taken.
    """

    class Handler(_Handler):
        live_data = data
        page = page_html(live=True)

    try:
        return ThreadingHTTPServer((_HOST, port), Handler)
    except OSError as error:
        raise OSError(f"Port {port} is taken: {error}. Choose another with --port.") from error


class _Handler(BaseHTTPRequestHandler):
    live_data: LiveData
    page: str

    def do_GET(self) -> None:
        port = self.connection.getsockname()[1]
        if self.headers.get("Host") not in (f"{_HOST}:{port}", f"localhost:{port}"):
            self._answer(HTTPStatus.FORBIDDEN, f"Ask for {_HOST}.")
            return
        url = urlsplit(self.path)
        if url.path == "/":
            self._answer(HTTPStatus.OK, self.page, "text/html")
            return
        try:
            self._answer_data(url.path, dict(parse_qsl(url.query)))
        except (OSError, ValueError) as error:
            self._answer(HTTPStatus.CONFLICT, str(error))

    def _answer_data(self, path: str, query: dict[str, str]) -> None:
        """Answer with a body, or with the index unless the page has it already."""
        data, version = self.live_data.current(), self.live_data.version
        if path == "/index" and query.get("version") == version:
            self._answer(HTTPStatus.NO_CONTENT, "")
        elif path == "/index":
            index = to_json(data.index | {"version": version})
            self._answer(HTTPStatus.OK, index, "application/json")
        elif path == "/body" and query.get("id") in data.bodies:
            self._answer(HTTPStatus.OK, data.bodies[query["id"]], "application/json")
        else:
            self._answer(HTTPStatus.NOT_FOUND, "Not here.")

    def _answer(self, status: HTTPStatus, text: str, content_type: str = "text/plain") -> None:
        content = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: requests are not news."""
