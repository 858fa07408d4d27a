"""Write a record of rollouts as one HTML page, or serve it while the run goes on.

Owns the command and the page: its parts put into one file that loads nothing. Leaves what is shown
to `report.py` and `viewer/`. Invariant: the page runs the scripts of `viewer/` and no other; its
content security policy names them by hash, and a record is data wherever it stands.
"""

import argparse
import base64
import hashlib
import re
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any, TextIO

from agent_vllm.inspect.viewer.data import Report, read_report, to_json
from agent_vllm.inspect.viewer.live import serve

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rollouts", type=Path, help="a file that `record_rollouts` wrote")
    parser.add_argument(
        "-o", "--output", type=Path, help="the page; beside the record, with .html, by default"
    )
    parser.add_argument(
        "--limit", type=int, default=1000, help="newest trajectories to show (default: 1000)"
    )
    parser.add_argument(
        "--serve", action="store_true", help="serve the page on 127.0.0.1 and follow the file"
    )
    parser.add_argument("--port", type=int, default=8765, help="for --serve (default: 8765)")


def run(args: argparse.Namespace) -> int:
    """Write or serve the page; what is wrong with the input is one line on standard error."""
    try:
        if args.limit < 1:
            raise ValueError(f"--limit must be 1 or more, got {args.limit}.")
        if args.serve:
            serve(args.rollouts, page(live=True), limit=args.limit, port=args.port)
        else:
            output = args.output or args.rollouts.with_suffix(".html")
            report = write_report(args.rollouts, output, limit=args.limit)
            print(f"{output}: {len(report.rows)} of {report.num_trajectories} trajectories")
    except (OSError, ValueError) as error:
        print(f"agent-vllm view: {error}", file=sys.stderr)
        return 1
    return 0


def write_report(rollouts: str | Path, output: str | Path, *, limit: int = 1000) -> Report:
    """Write the page of a record's newest `limit` trajectories.

    Raises:
        OSError: a file can't be read or written.
        ValueError: the record holds no trajectory, or is of another schema or kind.
    """
    report = read_report(Path(rollouts), limit)
    for note in report.notes:
        print(f"agent-vllm view: {note}", file=sys.stderr)
    if Path(output).exists() and Path(output).samefile(rollouts):
        raise ValueError(f"--output must be another file than the record, got {output}.")
    with Path(output).open("w", encoding="utf-8") as file:
        _write_page(file, report)
    return report


def page(*, live: bool) -> str:
    """The page without data; a live one fetches it from where it came from."""
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


def _write_page(file: TextIO, report: Report) -> None:
    """The index stands before the script and the bodies behind it: the list shows at once."""
    before, after = page(live=False).split("<!-- data -->")
    file.write(before)
    file.write(_data("index", report.index))
    start, end = after.split("<!-- bodies -->")
    file.write(start)
    for number, row in enumerate(report.rows):
        file.write(_data_text(f"body-{number}", report.bodies[row["id"]]))
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
