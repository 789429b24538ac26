"""Dependencies: the locks agree with pyproject.toml, installations check hashes, and licences are listed."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uv", reason="only where Wattfleet is developed")
tomllib = pytest.importorskip("tomllib")

from packaging.markers import Marker  # noqa: E402
from packaging.requirements import Requirement  # noqa: E402

from dependencies import audit, licences  # noqa: E402
from dependencies.requirements import Locked, entries, needed, normal, requirements  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
DEVICE_LOCK = ROOT / "requirements-device.lock"
SUPERNODE_LOCK = ROOT / "requirements-supernode.lock"
LOCKS = [LOCK, DEVICE_LOCK, SUPERNODE_LOCK]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {DEVICE_LOCK: ("agent", "plots", "serving", "jetson", "nvml"), SUPERNODE_LOCK: ("flower", "serving")}
"""The extras of a device, by lock."""

each_lock_of_devices = pytest.mark.parametrize("lock", EXTRAS, ids=lambda lock: lock.name)


def environment(python: str) -> dict[str, str]:
    return {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": "linux",
        "platform_machine": "aarch64",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
    }


def installed(lock: Path, python: str) -> dict[str, Locked]:
    """The packages, by name, that a lock installs on a Jetson with the given Python."""
    found = [
        each
        for each in entries(lock.read_text())
        if not each.marker or Marker(each.marker).evaluate(environment(python))
    ]
    assert len({each.name for each in found}) == len(found), "each package has one version"
    return {each.name: each for each in found}


def unsatisfied(extras: tuple[str, ...], locked: dict[str, Locked], python: str) -> list[str]:
    wanted = {line for extra in extras for line in requirements(PROJECT, extra)}
    return sorted(
        line
        for line, each in ((line, Requirement(line)) for line in wanted)
        if each.name != "torch"
        and (each.marker is None or each.marker.evaluate(environment(python)))
        and (normal(each.name) not in locked or locked[normal(each.name)].version not in each.specifier)
    )


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_lock_has_all_that_pyproject_requires(python: str) -> None:
    assert unsatisfied(("dev",), installed(LOCK, python), python) == [], "run `make lock`"


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
@each_lock_of_devices
def test_the_locks_of_devices_have_all_that_their_extras_require(lock: Path, python: str) -> None:
    assert unsatisfied(EXTRAS[lock], installed(lock, python), python) == [], "run `make lock`"


@each_lock_of_devices
def test_devices_get_the_versions_that_are_tested(lock: Path) -> None:
    tested, found = installed(LOCK, "3.12"), installed(lock, "3.12")
    differing = {
        name: (each.version, tested[name].version)
        for name, each in found.items()
        if name in tested and tested[name].version != each.version
    }
    assert differing == {}, "run `make lock`"
    sensors = {"jetson-stats", "nvidia-ml-py"}
    untested = [each for each in found.values() if each.name not in tested]
    assert all(each.name in sensors or each.parents <= sensors for each in untested), untested


def test_jetpack_6_gets_the_last_flower_for_its_python() -> None:
    versions = {python: installed(SUPERNODE_LOCK, python)["flwr"].version for python in ("3.10", "3.12")}
    assert versions["3.10"].startswith("1.30.") and versions["3.12"] == installed(LOCK, "3.12")["flwr"].version


def test_a_device_without_jtop_gets_no_copyleft_package() -> None:
    agent = needed(entries(DEVICE_LOCK.read_text()), requirements(PROJECT, "agent"))
    assert not {"jetson-stats", "nvidia-ml-py", "matplotlib"} & {each.name for each in agent}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_locked_package_has_the_hashes_of_all_its_files(lock: Path) -> None:
    text = lock.read_text()
    locked = list(entries(text))
    assert len(locked) == len(re.findall(r"^[A-Za-z0-9].*==", text, re.MULTILINE)) > 30
    hashes = {each.name: re.findall(r"--hash=sha256:([0-9a-f]{64})(?: \\)?$", each.text, re.M) for each in locked}
    assert [name for name, found in hashes.items() if not found] == []
    # A lock needs the files for every Python and machine, not only the one installed where the lock was made.
    assert len(hashes["numpy"]) > 20 and len(hashes["grpcio"]) > 20
    assert "://" not in text, "the index is whoever installs to choose"


def test_locks_agree_on_the_hashes_of_a_version() -> None:
    found: dict[tuple[str, str], dict[str, set[str]]] = {}
    for lock in LOCKS:
        for each in entries(lock.read_text()):
            hashes = set(re.findall(r"sha256:([0-9a-f]{64})", each.text))
            found.setdefault((each.name, each.version), {})[lock.name] = hashes
    shared = {key: list(by_lock.values()) for key, by_lock in found.items() if len(by_lock) > 1}
    assert len(shared) > 30
    assert [key for key, hashes in shared.items() if any(each != hashes[0] for each in hashes)] == []


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_has_all_that_its_packages_need(lock: Path) -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    locked = installed(lock, here)
    missing, checked = [], 0
    for each in locked.values():
        with suppress(PackageNotFoundError):  # a package for another platform
            if version(each.name) != each.version:
                continue
            checked += 1
            needs = [Requirement(line) for line in requires(each.name) or ()]
            missing += [
                f"{each.name} needs {need}"
                for need in needs
                if need.marker is None or need.marker.evaluate({**environment(here), "extra": ""})
                if normal(need.name) not in locked or locked[normal(need.name)].version not in need.specifier
            ]
    assert checked > 20
    assert missing == [], "run `make lock`"


def test_the_lock_has_what_torch_needs_but_neither_torch_nor_cuda() -> None:
    locked = installed(LOCK, "3.11")
    # nvidia-ml-py only talks to a driver.
    assert [name for name in locked if re.match(r"torch|nvidia-(?!ml-py)|cuda-|triton", name)] == []
    needs = [Requirement(line) for line in requires("torch") or ()]
    own = {normal(each.name) for each in needs if each.marker is None}
    assert own and own <= locked.keys() | {"triton"}


def test_every_installation_of_packages_checks_hashes() -> None:
    recipes = re.sub(r"\\\n", " ", (ROOT / "Makefile").read_text() + (ROOT / "deploy" / "Dockerfile").read_text())
    commands = [part for line in recipes.splitlines() for part in line.split("&&") if re.search(r"\binstall ", part)]
    pip = [part.strip() for part in commands if re.search(r"pip install|\(PIP\) install", part, re.I)]
    unchecked = [part for part in pip if "--require-hashes" not in part and "--no-deps" not in part]
    assert len(pip) > 5
    assert [part for part in unchecked if "torch" not in part.lower()] == []


def test_an_extra_brings_what_its_packages_need_with_hashes() -> None:
    found = {each.name: each for each in needed(entries(LOCK.read_text()), requirements(PROJECT, "agent"))}
    assert {"pydantic", "pydantic-core", "annotated-types", "cffi"} <= found.keys()
    assert not {"sqlalchemy", "flwr", "pytest", "jinja2"} & found.keys()
    assert all("--hash=sha256:" in each.text and "via" not in each.text for each in found.values())


def test_the_page_of_licences_is_current() -> None:
    assert (ROOT / "docs" / "licences.md").read_text() == licences.page(), "run `make licences`"


def test_every_runtime_dependency_has_a_licence_that_is_known() -> None:
    page = licences.page()
    rows = {row[0]: row for line in page.splitlines() if len(row := line.strip("| ").split(" | ")) == 5}
    assert not [name for name, row in rows.items() if licences.remark(row[2]).startswith("**")]
    assert "copyleft" in rows["jetson-stats"][3] and rows["jetson-stats"][4] == "jetson"
    strong = [name for name, row in rows.items() if re.search(r"(?<!L)GPL", row[2])]
    assert strong == ["jetson-stats"], "another copyleft dependency has to be optional, and mentioned"


@pytest.mark.parametrize(
    ("licence", "says"),
    [
        ("MIT", ""),
        ("LGPL-3.0-only", "copyleft for the library itself"),
        ("GPL-3.0-or-later", "copyleft"),
        ("AGPL-3.0", "copyleft, also for users over a network"),
        ("MPL-2.0", "copyleft for its own files"),
        ("unknown", "**look it up**"),
    ],
)
def test_copyleft_and_unknown_licences_are_pointed_out(licence: str, says: str) -> None:
    assert licences.remark(licence) == says


GOOD = {"name": "numpy", "version": "2.4.6", "vulns": []}
BAD = {"name": "idna", "version": "3.1", "vulns": [{"id": "CVE-1", "fix_versions": ["3.2"]}]}
UNKNOWN = {"name": "rich", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize(
    ("packages", "code", "says"),
    [
        ([GOOD], audit.CLEAN, "none of 1 packages"),
        ([GOOD, BAD, UNKNOWN], audit.VULNERABLE, "idna 3.1: CVE-1, fixed in 3.2"),
        ([GOOD, UNKNOWN], audit.NOT_AUDITED, "NOT AUDITED: 1 of 2 packages"),
        ([], audit.NOT_AUDITED, "NOT AUDITED"),
    ],
)
def test_an_audit_without_data_is_not_a_pass(packages: list[dict[str, Any]], code: int, says: str) -> None:
    found, lines = audit.verdict({"dependencies": packages})
    assert found == code and says in lines[0]
