"""A user's own Flower app, as `wattfleet simulate --app DIR` reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib
from flwr.app.user_config import UserConfig
from flwr.common.config import flatten_dict, parse_config_args

from wattfleet.core.errors import InvalidInputError

ROUNDS_KEY = "num-server-rounds"
"""The key of the run config with which apps take their number of rounds; `flwr new` writes it."""

_PROJECT = "pyproject.toml"
_IGNORED = {"__pycache__", ".git", ".venv", "node_modules", "out"}


@dataclass(frozen=True)
class OwnApp:
    """A Flower app in a folder.

    Attributes:
        folder: the folder.
        app_id: its publisher and name.
        serverapp: its ServerApp, such as `my_app.server_app:app`.
        clientapp: its ClientApp.
        config: its run config, with the values of this simulation.
        changed_config: the values that differ from those in its project file.
    """

    folder: Path
    app_id: str
    serverapp: str
    clientapp: str
    config: UserConfig
    changed_config: UserConfig

    def digests(self) -> dict[str, str]:
        """Return a digest of each of its Python files and of its project file, by path."""
        files = [self.folder / _PROJECT, *sorted(self.folder.rglob("*.py"))]
        return {
            str(file.relative_to(self.folder)): hashlib.sha256(file.read_bytes()).hexdigest()[:16]
            for file in files
            if not _IGNORED & set(file.relative_to(self.folder).parts)
        }


def read_app(folder: Path, rounds: int, run_config: str) -> OwnApp:
    """Read a Flower app.

    Args:
        folder: its folder.
        rounds: federated rounds, which replace those of its run config.
        run_config: values of the run config, as for `flwr run --run-config`.

    Raises:
        InvalidInputError: it is no Flower app, its rounds cannot be set, or the values cannot be read.
    """
    found, name = _described(folder)
    config: dict[str, Any] = flatten_dict(found.get("config", {}))
    try:
        changed: dict[str, Any] = parse_config_args([run_config]) if run_config else {}
    except Exception as error:  # Flower has no error of its own for this
        raise InvalidInputError(f'--run-config {run_config!r}: {error}: write it as for `flwr run`, "lr=0.1"') from None
    if unknown := sorted(set(changed) - set(config)):
        raise InvalidInputError(
            f"--run-config: {folder / _PROJECT} has no {', '.join(unknown)} in [tool.flwr.app.config]; it has"
            f" {', '.join(sorted(config)) or 'nothing'}"
        )
    if ROUNDS_KEY in changed:
        raise InvalidInputError(f"--run-config: pass --rounds instead of {ROUNDS_KEY}")
    if ROUNDS_KEY not in config:
        raise InvalidInputError(
            f"--app {folder}: its {_PROJECT} has no {ROUNDS_KEY} in [tool.flwr.app.config], with which --rounds sets"
            " the rounds: add it, and pass it to the strategy as num_rounds"
        )
    changed[ROUNDS_KEY] = rounds
    components = found["components"]
    return OwnApp(
        folder.resolve(),
        f"{found.get('publisher', 'own')}/{name}",
        components["serverapp"],
        components["clientapp"],
        {**config, **changed},
        {key: value for key, value in changed.items() if config.get(key) != value and key != ROUNDS_KEY},
    )


def _described(folder: Path) -> tuple[Mapping[str, Any], str]:
    """Return the part of an app's project file that is about Flower, and the app's name."""
    if not folder.is_dir():
        raise InvalidInputError(f"--app {folder}: there is no such folder")
    file = folder / _PROJECT
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInputError(
            f"--app {folder}: it is no Flower app, since it has no {_PROJECT}: name the folder that `flwr run` takes"
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"--app {folder}: its {_PROJECT} cannot be read: {error}") from None
    found = content.get("tool", {}).get("flwr", {}).get("app", {})
    components = found.get("components", {}) if isinstance(found, dict) else {}
    if missing := [each for each in ("serverapp", "clientapp") if ":" not in str(components.get(each, ""))]:
        raise InvalidInputError(
            f"--app {folder}: it is no Flower app, since its {_PROJECT} states no {' and no '.join(missing)} in"
            " [tool.flwr.app.components]"
        )
    return found, str(content.get("project", {}).get("name", folder.resolve().name))
