"""The manifests for Kubernetes: valid by its schemas, restricted as documented, and consistent with the images."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from coordinator.settings import CoordinatorSettings
from tests.fakes.certified import CertifiedFleet
from tests.fakes.documented_commands import check_call
from tests.fakes.served import serving
from wattfleet_io.cli import wattfleet

DEPLOY = Path(__file__).parents[3] / "deploy"
VERSION = "1.37"
HEALTH = DEPLOY / "image" / "coordinator_health.py"


def manifests() -> list[dict[str, Any]]:
    """Every object that kustomize would send."""
    listed = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())["resources"]
    return [each for name in listed for each in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())]


def pods() -> dict[str, dict[str, Any]]:
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in manifests()
        if "template" in each.get("spec", {})
    }


PODS = pods()
CONTAINERS = [
    pytest.param(container, id=f"{pod}-{container['name']}")
    for pod, spec in PODS.items()
    for container in [*spec.get("initContainers", []), *spec["containers"]]
]


@pytest.mark.parametrize("manifest", manifests(), ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_the_manifest_is_valid(manifest: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_every_file_is_listed() -> None:
    listed = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())["resources"]
    assert sorted([*listed, "kustomization.yaml"]) == sorted(path.name for path in (DEPLOY / "kubernetes").iterdir())


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_container_has_no_rights_and_writes_to_volumes_only(container: dict[str, Any]) -> None:
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] is True and context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"]["memory"] and container["resources"]["requests"]["memory"]


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_runs_as_an_unprivileged_user_and_is_probed(pod: str) -> None:
    spec = PODS[pod]
    assert spec["securityContext"]["runAsNonRoot"] is True and spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert all("readinessProbe" in container for container in spec["containers"])
    volumes = {volume["name"] for volume in spec["volumes"]}
    mounted = {
        mount["name"]
        for each in [*spec.get("initContainers", []), *spec["containers"]]
        for mount in each["volumeMounts"]
    }
    assert volumes <= mounted


def test_network_policies_and_services_select_pods_that_exist() -> None:
    labels = {
        tuple(each["spec"]["selector"]["matchLabels"].items())
        for each in manifests()
        if "template" in each.get("spec", {})
    }
    for each in manifests():
        if each["kind"] == "NetworkPolicy" and each["spec"]["podSelector"]:
            assert tuple(each["spec"]["podSelector"]["matchLabels"].items()) in labels
        if each["kind"] == "Service":
            assert tuple(each["spec"]["selector"].items()) in labels
    denied = next(each for each in manifests() if each["metadata"]["name"] == "nothing-else")
    assert denied["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_the_coordinator_is_started_with_options_and_settings_that_exist() -> None:
    [container] = PODS["coordinator"]["containers"]
    check_call([word for each in container["args"] for word in each.split("=", 1)], wattfleet)
    site = next(each for each in manifests() if each["metadata"]["name"] == "wattfleet-site")
    names = [*site["data"], *(each["name"] for each in container["env"] if each["name"].startswith("WATTFLEET_"))]
    for name in names:
        group, _, key = name.removeprefix("WATTFLEET_COORDINATOR_").lower().partition("_")
        assert key in type(getattr(CoordinatorSettings(site={"budget_w": 1.0}), group)).model_fields, name


def test_images_and_files_are_those_of_the_dockerfile() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    own = {each.values[0]["image"] for each in CONTAINERS} - {"postgres:17-bookworm"}
    assert {image.removeprefix("wattfleet-") for image in own} <= targets
    assert f"deploy/image/{HEALTH.name}" in dockerfile
    [user] = re.findall(r"--uid (\d+)", dockerfile)
    assert {str(PODS[pod]["securityContext"]["runAsUser"]) for pod in ("coordinator", "superlink")} == {user}


async def test_the_probe_asks_the_health_service_over_tls(
    config: CoordinatorSettings, fleet: CertifiedFleet, tmp_path: Path
) -> None:
    directory = {"directory": tmp_path / "authority", "enrolment_address": "127.0.0.1:0"}
    async with serving(config.with_values(identity=directory)) as served:
        assert served.bound.enrolment_address is not None
        assert await _probe(served.bound.enrolment_address) == (0, "")
        code, said = await _probe(served.bound.address)
        assert code == 1 and served.bound.address in said, "this address needs a certificate"
    code, said = await _probe(served.bound.enrolment_address)
    assert code == 1 and "refused" in said


async def _probe(address: str) -> tuple[int | None, str]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(HEALTH), address, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await child.communicate()
    return child.returncode, said.decode()
