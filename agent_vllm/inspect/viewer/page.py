"""Write recorded rollouts as one HTML page that loads nothing.

Owns how the page is put together. Invariant: it runs the scripts in `static/` and no others; its
content security policy names them by hash, and a record is data wherever it stands.
"""

import base64
import hashlib
import re
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any, TextIO

from agent_vllm.inspect.viewer.data import PageData, read_page_data, to_json

# Later ones use what earlier ones define.
_SCRIPTS = (
    "dom.js",
    "data.js",
    "list.js",
    "chat.js",
    "tokens.js",
    "timeline.js",
    "group.js",
    "charts.js",
    "app.js",
)
_SOURCES = files("agent_vllm.inspect.viewer") / "static"


def write_page(rollouts: str | Path, output: str | Path, *, limit: int = 1000) -> PageData:
    """Write the page of a record's newest `limit` trajectories, and return what is on it.

    Raises:
        OSError: a file can't be read or written.
        ValueError: the record holds no trajectory, or has another schema or kind.
    """
    data = read_page_data(Path(rollouts), limit)
    for note in data.notes:
        print(f"agent-vllm view: {note}", file=sys.stderr)
    if Path(output).exists() and Path(output).samefile(rollouts):
        raise ValueError(f"--output must be another file than the record, got {output}.")
    with Path(output).open("w", encoding="utf-8") as file:
        _write_parts(file, data)
    return data


def page_html(*, live: bool) -> str:
    """Return the page without data; a live one fetches them from its server."""
    style = _source("style.css")
    script = "(() => {\n'use strict';\n" + "\n".join(map(_source, _SCRIPTS)) + "\n})();\n"
    source = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        f"img-src data:; connect-src {source}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "style": style, "script": script}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _source("index.html"))


def _write_parts(file: TextIO, data: PageData) -> None:
    """Write the index before the script and the bodies after it, so that the list shows at once."""
    before, after = page_html(live=False).split("<!-- data -->")
    file.write(before)
    file.write(_data("index", data.index))
    start, end = after.split("<!-- bodies -->")
    file.write(start)
    for number, row in enumerate(data.rows):
        file.write(_data_text(f"body-{number}", data.bodies[row["id"]]))
    file.write(end)


def _data(element_id: str, value: Any) -> str:
    return _data_text(element_id, to_json(value))


def _data_text(element_id: str, text: str) -> str:
    return f'<script type="application/json" id="{element_id}">{text}</script>\n'


def _source(name: str) -> str:
    return (_SOURCES / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
