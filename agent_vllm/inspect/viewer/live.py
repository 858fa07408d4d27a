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
from urllib.parse import parse_qs, urlsplit

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
        version: number of times that the file was read.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.version = 0
        self._data = PageData(name=path.name)
        self._read_state: tuple[int, int] | None = None
        self._next_s = 0.0
        self._lock = threading.Lock()

    def current(self) -> PageData:
        """Return the data. Raises ValueError if the file is not a record, OSError if unreadable."""
        with self._lock:
            state = self._file_state()
            start_s = time.monotonic()
            if state != self._read_state and start_s >= self._next_s:
                self._data = self._read()
                self._next_s = start_s + (time.monotonic() - start_s) / _READING_SHARE
                self._read_state = state
                self.version += 1
            return self._data

    def _file_state(self) -> tuple[int, int] | None:
        if not self.path.exists():
            return None
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns

    def _read(self) -> PageData:
        try:
            return read_page_data(self.path, self.limit)
        except (FileNotFoundError, EmptyRecordError):  # nothing was recorded yet
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
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        port = self.connection.getsockname()[1]
        if self.headers.get("Host") not in (f"{_HOST}:{port}", f"localhost:{port}"):
            self._answer(HTTPStatus.FORBIDDEN, f"Ask for {_HOST}.")
        elif url.path == "/":
            self._answer(HTTPStatus.OK, self.page, "text/html")
        elif url.path == "/index":
            self._index(query.get("version"))
        elif url.path == "/body" and query.get("id") in (bodies := self.live_data.current().bodies):
            self._answer(HTTPStatus.OK, bodies[query["id"]], "application/json")
        else:
            self._answer(HTTPStatus.NOT_FOUND, "Not here.")

    def _index(self, seen_version: str | None) -> None:
        """Answer with the index, or with nothing if the page has it already."""
        try:
            index = self.live_data.current().index
        except (OSError, ValueError) as error:
            self._answer(HTTPStatus.CONFLICT, str(error))
            return
        version = self.live_data.version
        if seen_version == str(version):
            self._answer(HTTPStatus.NO_CONTENT, "", "application/json")
        else:
            index = to_json(index | {"version": version})
            self._answer(HTTPStatus.OK, index, "application/json")

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
