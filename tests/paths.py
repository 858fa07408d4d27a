"""Folders of the repository, for tests: the only module that knows how deep it lies."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"

# For processes that tests start: they import what tests import.
PYTHONPATH = os.pathsep.join(map(str, (ROOT, EXAMPLES, TESTS)))
