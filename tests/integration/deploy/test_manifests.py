"""The compose file and Kubernetes' manifests: valid, restricted as documented, and consistent with the images."""

from __future__ import annotations

import asyncio
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import tomllib
import typer
import yaml

import coordinator.cli.commands
import edge_agent.cli.commands
from coordinator.settings import CoordinatorSettings
from edge_agent.paths import SUPERNODE_DIRECTORY
from tests.fakes.documented_commands import check_call
from tests.fakes.served import CertifiedFleet, serving
from wattfleet.common.cli import wattfleet
from wattfleet.flower.supernode.command import DEFAULT_FOLDER
from wattfleet.simulation import commands
from wattfleet.simulation.devices import DEFAULT_FLEET, device_specs

# --- Compose file -----------------------------------------------------------------------------------------------------
# The compose file is consistent, exposes ports to this machine only, and is accepted by both compose versions.


DEPLOY = Path(__file__).parents[3] / "deploy"
SPECS = dict(device_specs(DEFAULT_FLEET, []))
FLEET = set(SPECS)

Service = dict[str, Any]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Service]:
    return compose["services"]


def options(service: Service) -> dict[str, str]:
    """The `--name=value` options of a service's command."""
    return dict(word[2:].split("=", 1) for word in service["command"] if "=" in word)


def default(value: str) -> str:
    """The default value in `${VARIABLE:-default}`."""
    found = re.fullmatch(r"\$\{WATTFLEET_\w+:-(.*)\}", value)
    assert found, value
    return found[1]


def mounts(service: Service) -> dict[str, str]:
    """Named volumes and folders of the host, by their path in the container."""
    return {mount.split(":")[1]: mount.split(":")[0] for mount in service.get("volumes", [])}


def test_every_device_is_an_agent_and_a_supernode(services: dict[str, Service]) -> None:
    assert {name.removesuffix("-agent") for name in services if name.endswith("-agent")} == FLEET
    assert {name.removesuffix("-supernode") for name in services if name.endswith("-supernode")} == FLEET


@pytest.mark.parametrize("device", sorted(FLEET))
def test_a_supernode_reaches_its_own_agent_and_no_other(services: dict[str, Service], device: str) -> None:
    agent, supernode = services[f"{device}-agent"], services[f"{device}-supernode"]
    agent_options = options(agent)

    assert agent_options["device-id"] == device
    assert agent_options["device"] == SPECS[device]
    socket_folder, state = str(Path(agent_options["socket"]).parent), agent_options["state-dir"]
    # The files with which the agent has enrolled its SuperNode, and no other files of the agent.
    enrolled = str(Path(state) / SUPERNODE_DIRECTORY)
    assert enrolled == str(DEFAULT_FOLDER), "the SuperNode looks there"
    assert mounts(supernode) == {socket_folder: f"{device}-socket", enrolled: f"{device}-supernode"}
    assert mounts(agent) == {**mounts(supernode), state: f"{device}-state", "/var/lib/invites": "invites"}
    assert f"{device}-agent" in supernode["depends_on"]


def test_the_fleet_is_the_one_that_simulate_runs(services: dict[str, Service]) -> None:
    """Same boards, same seeds and same data give the same fronts and plans."""
    assert not any("minibatches-per-epoch" in options(services[f"{device}-agent"]) for device in SPECS)
    agents = [options(services[f"{device}-agent"]) for device in SPECS]
    assert [int(agent["seed"]) for agent in agents] == list(range(len(SPECS)))
    nodes = [options(services[f"{device}-supernode"])["node-config"] for device in SPECS]
    assert nodes == [f"partition-id={number}" for number in range(len(SPECS))]


def test_defaults_are_those_of_simulate(services: dict[str, Service]) -> None:
    simulate = {name: parameter.default for name, parameter in inspect.signature(commands.simulate).parameters.items()}
    serve, run = options(services["coordinator"]), options(services["flower-run"])
    assert float(default(serve["site-budget-w"])) == commands.SITE_BUDGET_W
    assert default(serve["policy"]) == simulate["policy"]
    assert int(default(serve["profile-modes"])) == simulate["modes"]
    assert int(default(run["rounds"])) == simulate["rounds"]
    assert int(run["devices"]) == len(SPECS)


@pytest.mark.parametrize("name", ["coordinator", *(f"{device}-agent" for device in sorted(FLEET))])
def test_commands_have_the_options_that_they_are_given(services: dict[str, Service], name: str) -> None:
    groups = {"coordinator": coordinator.cli.commands.app, "agent": edge_agent.cli.commands.app}
    group, subcommand = services[name]["command"][:2]
    command = typer.main.get_command(groups[group]).commands[subcommand]
    parameters = command.get_params(click.Context(command))
    assert set(options(services[name])) <= {option[2:] for parameter in parameters for option in parameter.opts}


def test_nothing_is_served_or_used_in_plaintext(services: dict[str, Service]) -> None:
    assert not [name for name, service in services.items() if "--insecure" in str(service)]
    assert not [file.name for file in (DEPLOY / "image").iterdir() if "insecure" in file.read_text()]
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert [job["scheme"] for job in scraped] == ["https"]
    keys = {
        Path(path).parent for job in scraped for path in (job["tls_config"]["key_file"], job["tls_config"]["ca_file"])
    }
    assert {mounts(services["prometheus"])[str(folder)] for folder in keys} == {"prometheus-identity"}


def test_authority_and_invites_come_before_those_who_need_them(services: dict[str, Service]) -> None:
    once = {"condition": "service_completed_successfully"}
    assert services["coordinator"]["depends_on"]["authority"] == once
    machines = [word for word in services["invites"]["command"] if not word.startswith("--")]
    invited = {name: service for name, service in services.items() if "WATTFLEET_INVITE" in str(service)}
    assert set(invited) == {*(f"{device}-agent" for device in FLEET), "superlink", "flower-run"}
    files = {name: Path(service["environment"]["WATTFLEET_INVITE"]) for name, service in invited.items()}
    assert sorted(file.name for file in files.values()) == sorted(word.partition(":")[2] for word in machines)
    for name, service in invited.items():
        assert mounts(service)[str(files[name].parent)] == "invites"
        assert "invites" in service["depends_on"] or "superlink" in service["depends_on"], name
    assert {word for word in machines if word.startswith("device:")} == {f"device:{device}" for device in FLEET}


def test_no_secret_is_in_the_file(services: dict[str, Service]) -> None:
    assert "wfj1/" not in str(services)
    assert not [name for name, service in services.items() if re.search("token|password", str(service), re.IGNORECASE)]


def test_identities_outlive_a_container(services: dict[str, Service]) -> None:
    for name in ("coordinator", "authority", "superlink", "flower-run", *(f"{device}-agent" for device in FLEET)):
        assert "/var/lib/wattfleet" in mounts(services[name]), name
    assert mounts(services["authority"]) == mounts(services["coordinator"])


def test_the_run_waits_for_the_whole_fleet_and_is_not_restarted(services: dict[str, Service]) -> None:
    run = services["flower-run"]
    assert run["restart"] == "no"
    assert {f"{device}-supernode" for device in FLEET} < set(run["depends_on"])


def test_dependencies_exist_and_can_become_healthy(services: dict[str, Service]) -> None:
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            assert needed in services, name
            # docker-compose 1.29 supports no other keys, such as `required` or `restart`.
            assert set(how) == {"condition"}, name
            assert how["condition"] != "service_healthy" or "healthcheck" in services[needed], (name, needed)


def test_volumes_are_declared_and_used(compose: dict[str, Any], services: dict[str, Service]) -> None:
    sources = {source for service in services.values() for source in mounts(service).values()}
    named = {source for source in sources if not source.startswith(".")}
    assert named == set(compose["volumes"])
    for folder in sources - named:
        assert (DEPLOY / folder).is_dir()


def test_ports_are_open_to_this_machine_only(services: dict[str, Service]) -> None:
    published = {
        name: [port.split(":") for port in service["ports"]] for name, service in services.items() if "ports" in service
    }
    assert all(host == "127.0.0.1" for ports in published.values() for host, _, _ in ports)
    assert {name: [int(port) for _, port, _ in ports] for name, ports in published.items()} == {
        "coordinator": [7070, 7071, 9464],
        "prometheus": [9090],
        "grafana": [3000],
    }


def test_memory_is_bounded_and_rights_are_dropped(services: dict[str, Service]) -> None:
    for name, service in services.items():
        assert "mem_limit" in service, name
        assert service["cap_drop"] == ["ALL"], name
        assert not service.get("privileged"), name


def test_only_grafana_can_be_left_out_and_nothing_waits_for_it(services: dict[str, Service]) -> None:
    assert {name for name, service in services.items() if "profiles" in service} == {"grafana"}
    assert "COMPOSE_PROFILES=grafana" in (DEPLOY / ".env").read_text().splitlines()
    assert not any("grafana" in service.get("depends_on", {}) for service in services.values())


def test_images_are_built_from_targets_of_the_dockerfile(services: dict[str, Service]) -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    built = [service for service in services.values() if "build" in service]
    assert {service["image"] for service in built} == {
        f"wattfleet-{role}" for role in ("agent", "coordinator", "supernode", "superlink")
    }
    for service in built:
        assert service["build"]["target"] in targets
        assert service["image"] == f"wattfleet-{service['build']['target']}"
        assert set(service["build"]["args"]) <= set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "jetson/Dockerfile"])
def test_images_are_built_from_all_packages(dockerfile: str) -> None:
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    packages = {Path(path).parts[0] for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    copied = set(re.findall(r"^COPY (\S+) /src/\1$", (DEPLOY / dockerfile).read_text(), re.MULTILINE))
    let_in = {line[1:] for line in (DEPLOY.parent / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert packages == copied
    assert packages <= let_in
    files = set(
        re.findall(r"^COPY ((?:requirements|dependencies|deploy/image)\S*) ", (DEPLOY / dockerfile).read_text(), re.M)
    )
    assert all(any(file == each or file.startswith(f"{each}/") for each in let_in) for file in files)


@pytest.mark.parametrize("version", ["docker-compose", "docker compose"])
@pytest.mark.parametrize(
    "files",
    [
        ["docker-compose.yml"],
        ["docker-compose.yml", "docker-compose.debian-prometheus.yml"],
        ["jetson/docker-compose.yml"],
    ],
    ids=["fleet", "fleet with Debian's Prometheus", "Jetson"],
)
def test_compose_reads_it(version: str, files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = version.split()
    if not shutil.which(command[0]) or subprocess.run([*command, "version"], capture_output=True).returncode:
        pytest.skip(f"{version} is not installed")
    for name in ("WATTFLEET_COORDINATOR", "WATTFLEET_DEVICE_ID", "TORCH_IMAGE"):
        monkeypatch.setenv(name, "chosen")
    chosen = [word for file in files for word in ("-f", str(DEPLOY / file))]
    read = subprocess.run([*command, *chosen, "config", "--quiet"], capture_output=True, text=True)
    assert (read.returncode, read.stdout, read.stderr) == (0, "", "")


def test_running_the_rounds_alone_starts_the_whole_fleet(services: dict[str, Service]) -> None:
    """As `docker compose run flower-run` in deploy/README.md."""
    started, begun = set(), ["flower-run"]
    while begun:
        name = begun.pop()
        started.add(name)
        begun += set(services[name].get("depends_on", ())) - started
    assert set(services) - started == {"prometheus", "grafana"}


def test_no_documented_command_stops_the_fleet_when_a_one_shot_service_has_ended(services: dict[str, Service]) -> None:
    ends_first = {name for name, service in services.items() if service.get("restart") == "no"} - {"flower-run"}
    assert ends_first == {"authority", "invites"}
    blocks = re.findall(r"^```\w*\n(.*?)^```", (DEPLOY / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    commands_in_blocks = [line for block in blocks for line in block.splitlines() if "compose" in line]
    assert any("run --rm -T flower-run" in line for line in commands_in_blocks)
    for line in commands_in_blocks:
        assert not re.search(r"--exit-code-from|--abort-on-container-exit", line), line


# --- Kubernetes -------------------------------------------------------------------------------------------------------
# The manifests for Kubernetes: valid by its schemas, restricted as documented, and consistent with the images.

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
