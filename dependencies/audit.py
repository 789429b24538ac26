"""Look up the locked packages in a vulnerability database with pip-audit.

    python -m dependencies.audit requirements.lock requirements-device.lock requirements-supernode.lock
    AUDIT_ARGS="--vulnerability-service osv" python -m dependencies.audit requirements.lock

Exit codes: 0 if no package has a known vulnerability; 1 if some have one; 2 if some packages could not be looked up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CLEAN, VULNERABLE, NOT_AUDITED = 0, 1, 2
_SHOWN = 5


def verdict(report: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the exit code for a JSON report of pip-audit, and lines of text for people.

    On its own, pip-audit treats a package that its service does not know as safe.
    """
    packages = report["dependencies"]
    unknown = [each["name"] for each in packages if "skip_reason" in each]
    lines = [
        f"{each['name']} {each['version']}: {found['id']}, fixed in {', '.join(found['fix_versions']) or 'no version'}"
        for each in packages
        for found in each.get("vulns", [])
    ]
    if lines:
        return VULNERABLE, lines
    if unknown or not packages:
        named = ", ".join(unknown[:_SHOWN]) + (", ..." if len(unknown) > _SHOWN else "")
        return NOT_AUDITED, [
            f"NOT AUDITED: {len(unknown)} of {len(packages)} packages could not be looked up ({named}). Run this where"
            ' a vulnerability database can be reached; AUDIT_ARGS="--vulnerability-service osv" selects another one.'
        ]
    return CLEAN, [f"none of {len(packages)} packages has a known vulnerability"]


def report_of(lock: Path) -> dict[str, Any]:
    """Return pip-audit's report on a lock; without packages if its service does not answer."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip_audit", "--requirement", str(lock), "--disable-pip", "--format", "json"),
            *("--progress-spinner", "off", *os.environ.get("AUDIT_ARGS", "").split()),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"dependencies": []}
    return report


def main(locks: Sequence[str]) -> int:
    """Audit each lock, and return the worst exit code. A known vulnerability is worse than a failed look-up."""
    codes = []
    for lock in locks:
        code, lines = verdict(report_of(Path(lock)))
        print(*(f"{lock}: {line}" for line in lines), sep="\n")
        codes.append(code)
    return VULNERABLE if VULNERABLE in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
