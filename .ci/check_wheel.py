"""Install the built wheel in a fresh environment and use it from another folder.

The environment sees the packages of `.venv`, and the project only through its wheel. `make
wheel-check` builds the wheel first.
"""

import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("agent_vllm", "trl_integration")
FACTS = """
import agent_vllm, trl_integration
from importlib.metadata import version
print(agent_vllm.__version__, version("agent-vllm"), agent_vllm.__file__, trl_integration.__file__)
"""


def main() -> int:
    """Check the one wheel in `dist/`; the first fault ends the check."""
    [wheel] = (ROOT / "dist").glob("*.whl")
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder, "environment")
        install(wheel, environment)
        check_use(wheel, environment, Path(folder))
    print(f"wheel: {wheel.name} imports and runs outside of the repository")
    return 0


def check_contents(wheel: Path) -> None:
    """Fail on a missing file, and on a README link that a package index can't follow."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        readme = archive.read(metadata).decode()
    for package in PACKAGES:
        require(f"{package}/py.typed" in names, f"{package}/py.typed is not in the wheel")
    require(any(name.endswith("licenses/LICENSE") for name in names), "LICENSE is not in the wheel")
    strangers = {name.split("/")[0] for name in names} - {*PACKAGES, metadata.split("/")[0]}
    require(not strangers, f"the wheel also holds {sorted(strangers)}")
    links = re.findall(r"\]\((?!https?:|#)[^)]*\)", readme)
    require(not links, f"the wheel's README has relative links: {links}")


def install(wheel: Path, environment: Path) -> None:
    """Make a fresh environment of this one's packages and the wheel."""
    venv.create(environment, with_pip=False)
    packages = [path for path in sys.path if path.endswith("site-packages")]
    [site] = environment.glob("lib/python*/site-packages")
    # Paths in a .pth file are searched, but their own .pth files, the editable project, are not.
    (site / "packages.pth").write_text("\n".join(packages) + "\n")
    python = str(environment / "bin" / "python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", str(wheel))


def check_use(wheel: Path, environment: Path, folder: Path) -> None:
    """Import both packages and call the command from `folder`."""
    version = wheel.name.split("-")[1]
    found, installed, *files = run(str(environment / "bin" / "python"), "-c", FACTS, cwd=folder)
    require(found == installed == version, f"__version__ is {found}, the wheel's is {version}")
    for file in files:
        require(file.startswith(str(environment)), f"{file} is not the wheel's")
    command = str(environment / "bin" / "agent-vllm")
    require("doctor" in run(command, "--help", cwd=folder), "agent-vllm --help names no doctor")
    require(version in run(command, "--version", cwd=folder), "agent-vllm --version is wrong")


def run(*command: str, cwd: Path = ROOT) -> list[str]:
    """Run a command and return the words it printed."""
    done = subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    return done.stdout.split()


def require(condition: bool, fault: str) -> None:
    if not condition:
        sys.exit(f"wheel: {fault}")


if __name__ == "__main__":
    sys.exit(main())
