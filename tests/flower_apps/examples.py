"""Flower's examples as they are run here: what is replaced in them, and the lines that make them power-aware."""

from __future__ import annotations

import ast
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

STAND_INS = Path(__file__).parent / "stand_ins"
"""Modules that replace the loading of data, which examples download."""

POWER_AWARE, WITHOUT_MEASURING, PLAIN = "power-aware", "power-aware without measuring", "plain"
_OPTIONS = {POWER_AWARE: "", WITHOUT_MEASURING: ", survey_s=None, measures_left_out=False, allowance_s=None"}


@dataclass(frozen=True)
class Example:
    """One of Flower's examples.

    Attributes:
        name: its folder.
        kind: what kind of app it is, for the table in the documents.
        needs: the modules that it imports, apart from Flower's and those that are replaced.
        config: values of its run config; each run also gets few rounds, and trains and evaluates on every node.
        has_strategy: whether it has a strategy to wrap. Others get the mod alone.
        is_exact: whether a run gives the same arrays each time, from the same random numbers.
        note: what the table states about it.
    """

    name: str
    kind: str
    needs: Sequence[str] = ()
    config: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    has_strategy: bool = True
    is_exact: bool = True
    note: str = ""

    @property
    def id(self) -> str:
        """Its name, and what distinguishes it from another run of the same example."""
        return self.name + "".join(f" {value}" for key, value in self.config.items() if key == "train-method")

    @property
    def absent(self) -> list[str]:
        """The modules that it needs and that are not installed."""
        return [module for module in self.needs if find_spec(module) is None]


EXAMPLES = (
    Example("quickstart-pytorch", "PyTorch", ("torch",)),
    Example("advanced-pytorch", "PyTorch, a strategy with a `start` of its own", ("torch",)),
    Example("custom-mods", "PyTorch, with mods of its own", ("torch", "tensorboard")),
    Example("federated-vae", "PyTorch, an autoencoder", ("torch",)),
    Example("fl-tabular", "PyTorch, tables", ("torch", "sklearn", "pandas")),
    Example("opacus", "PyTorch, differential privacy of samples", ("torch", "opacus", "tqdm"), is_exact=False),
    Example("quickstart-pytorch-lightning", "PyTorch Lightning", ("pytorch_lightning",)),
    Example("quickstart-jax", "JAX", ("jax", "flax"), {"batch-size": 32}, is_exact=False),
    Example("quickstart-tensorflow", "TensorFlow", ("tensorflow",), is_exact=False),
    Example("quickstart-numpy", "NumPy"),
    Example("quickstart-sklearn", "scikit-learn", ("sklearn", "pandas")),
    Example("quickstart-xgboost", "XGBoost, bagging", ("xgboost",), {"params.nthread": 1}),
    Example(
        "xgboost-comprehensive",
        "XGBoost, bagging",
        ("xgboost",),
        {"train-method": "bagging", "params.nthread": 1, "centralised-eval": False},
    ),
    Example(
        "xgboost-comprehensive",
        "XGBoost, cyclic",
        ("xgboost",),
        {"train-method": "cyclic", "params.nthread": 1, "centralised-eval": False},
    ),
    Example(
        "quickstart-catboost",
        "CatBoost, without a strategy",
        ("catboost", "pandas"),
        {"fraction-sample": 1.0},
        has_strategy=False,
        note="its loop sends trainings without a strategy: outside the budget, with a warning",
    ),
    Example(
        "quickstart-pandas",
        "statistics, without a strategy",
        ("pandas",),
        {"fraction-sample": 1.0},
        has_strategy=False,
        note="queries are no trainings, and are not planned",
    ),
    Example(
        "federated-kaplan-meier-fitter",
        "statistics, without a strategy",
        ("lifelines", "pandas"),
        has_strategy=False,
        note="queries are no trainings, and are not planned",
    ),
    Example(
        "flower-secure-aggregation",
        "secure aggregation",
        ("torch",),
        {"is-demo": False},
        has_strategy=False,
        is_exact=False,
        note="`PowerAware` refuses its strategy; with the mod alone it trains outside the budget, with a warning",
    ),
    Example(
        "fl-dp-sa",
        "secure aggregation, with differential privacy",
        ("torch",),
        {"num-sampled-clients": 4},
        has_strategy=False,
        is_exact=False,
        note="as the one above",
    ),
)

# --- Changes ----------------------------------------------------------------------------------------------------------

ROUNDS = 3
_ALL_NODES = (
    # Without a plan, a strategy draws some nodes. A plan with enough watts has them all, so both get all of them.
    (r"fraction_(train|evaluate|fit)=[\w.\[\]\"-]+(?=[,)\s])", r"fraction_\1=1.0"),
    (r"min_(fit|available)_clients=\w+", r"min_\1_clients=4"),
)
_MOVED = (
    # Names that Flower has moved since the examples were written.
    ("from flwr.common.typing import UserConfig", "from flwr.app.user_config import UserConfig"),
    ("from flwr.client.typing import", "from flwr.clientapp.typing import"),
)


def components(app: Path) -> dict[str, Any]:
    """The `[tool.flwr.app]` of an app's `pyproject.toml`."""
    found: dict[str, Any] = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    return found


def file_of(app: Path, component: str) -> Path:
    """The file of the `serverapp` or the `clientapp` of an app."""
    module = components(app)["components"][component].partition(":")[0]
    return app / f"{module.replace('.', '/')}.py"


def prepared(example: Example, source: Path, target: Path, variant: str) -> Path:
    """Copy an example to a folder; a power-aware one gets the two lines. Returns the folder of the copy.

    Without measuring, each node trains exactly as often as in the plain example, so that both can be compared.
    """
    app = target / "app"
    shutil.copytree(source / example.name, app, ignore=shutil.ignore_patterns("__pycache__"))
    for file in app.rglob("*.py"):
        text = file.read_text()
        for earlier, now in _MOVED:
            text = text.replace(earlier, now)
        file.write_text(text)
    server, client = file_of(app, "serverapp"), file_of(app, "clientapp")
    text = server.read_text()
    for pattern, replacement in _ALL_NODES:
        text = re.sub(pattern, replacement, text)
    server.write_text(text)
    if variant != PLAIN:
        if example.has_strategy:
            server.write_text(with_power_aware(server.read_text(), _OPTIONS[variant]))
        client.write_text(with_mod(client.read_text()))
    return app


def with_power_aware(source: str, options: str) -> str:
    """Wrap each strategy that is assigned to the name whose `start` is called."""
    tree = ast.parse(source)
    started = {
        node.func.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "start"
        and isinstance(node.func.value, ast.Name)
    }
    assigned = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in started
        and isinstance(node.value, ast.Call)
    ]
    assert assigned, "the example starts a strategy"
    # The last strategy may wrap the one before it, as for differential privacy.
    wrapped = [each for each in assigned if not _is_wrapped_later(each, assigned)]
    for call in sorted(wrapped, key=lambda each: -each.lineno):
        source = _replaced(source, call, f"PowerAware({ast.get_source_segment(source, call)}{options})")
    return _with_import(source, "from wattfleet.flower import PowerAware")


def _is_wrapped_later(call: ast.Call, others: Sequence[ast.Call]) -> bool:
    return any(
        isinstance(argument, ast.Name) and other.lineno > call.lineno
        for other in others
        if other is not call
        for argument in other.args
    )


def with_mod(source: str) -> str:
    """List the mod first among those of the ClientApp."""
    [call] = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ClientApp"
    ]
    text = ast.get_source_segment(source, call) or ""
    if any(keyword.arg == "mods" for keyword in call.keywords):
        changed = re.sub(r"mods=\[", "mods=[power_mode_mod, ", text)
    else:
        others = text.removeprefix("ClientApp(")
        changed = f"ClientApp(mods=[power_mode_mod]{'' if others == ')' else ', '}{others}"
    assert changed != text
    return _with_import(_replaced(source, call, changed), "from wattfleet.flower import power_mode_mod")


def _replaced(source: str, node: ast.expr, text: str) -> str:
    lines = source.splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: (node.end_lineno or 0) - 1])) + (node.end_col_offset or 0)
    return source[:begin] + text + source[end:]


def _with_import(source: str, line: str) -> str:
    first = next(node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom)))
    lines = source.splitlines(keepends=True)
    return "".join([*lines[: first.lineno - 1], f"{line}\n", *lines[first.lineno - 1 :]])
