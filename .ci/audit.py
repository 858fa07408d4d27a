"""Known vulnerabilities of the locked packages: `make audit`. Fails on one that is known.

Asks the registry's own advisories by pip-audit, which is installed into a folder of its own. Where
they can't be had (a mirror without them, no network), says "not checked", and doesn't fail:
pip-audit itself would call that no known vulnerabilities.
"""

import json
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "audit"
LOCK = ROOT / "requirements" / "cpu.lock"


def report_on(lock):
    """Return what pip-audit says of each package, or None where it can't be asked."""
    python = FOLDER / "bin" / "python"
    if not python.exists():
        venv.create(FOLDER, with_pip=True)
    options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
    for command in (
        [python, "-m", "pip", "install", "-q", "pip-audit>=2.10,<3"],
        [python, "-m", "pip_audit", "-r", str(lock), *options],
    ):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)  # noqa: S603
    try:
        return json.loads(done.stdout)["dependencies"]
    except ValueError:
        return None


def main():
    packages = report_on(LOCK)
    if packages is None:
        print("audit: not checked: pip-audit gave no report")
        return 0
    unchecked = [package["name"] for package in packages if "skip_reason" in package]
    found = [
        f"{package['name']} {package['version']}: {known['id']}, fixed in {known['fix_versions']}"
        for package in packages
        for known in package.get("vulns", [])
    ]
    print(f"audit: {len(packages) - len(unchecked)} packages checked, {len(found)} known to be bad")
    if unchecked:
        print(f"audit: not checked, as the registry tells nothing of them: {', '.join(unchecked)}")
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
