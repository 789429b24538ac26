"""Command options from environment variables and the user's settings file, and how daemons treat them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from wattfleet.common import cli
from wattfleet.common.cli import name_variables
from wattfleet.common.settings.command import SettingsCommand, variables_of
from wattfleet.common.settings.user_file import FILE_VARIABLE
from wattfleet.core.errors import InvalidInputError

needs_all = pytest.mark.skipif(find_spec("torch") is None, reason="the extra `simulation` is not installed")
NOBODY = "127.0.0.1:9"
ONE_SHOT = {"--yes", "--dry-run", "--end", "--undo", "--allow-writable", "--root", "--role", "--add", "--remove"}
BOTH_READ = {"WATTFLEET_AGENT_PROFILE_TOLERANCE", "WATTFLEET_AGENT_PROFILE_MINIBATCHES_PER_EPOCH"}
"""They mean the same to `agent run` and `agent profile`."""


@click.command()
@click.option("--oven-w", type=int, default=1)
@click.option("--fan/--no-fan", default=False)
@click.option("--guest", "guests", multiple=True)
@click.option("--tin", type=click.Path(path_type=Path))
@click.option("--burn", is_flag=True, allow_from_autoenv=False)
def cook(oven_w: int, fan: bool, guests: tuple[str, ...], tin: Path | None, burn: bool) -> None:
    click.echo(f"{oven_w} {fan} {' '.join(guests)} {tin} {burn}")


@click.group(cls=cli.InstalledCommands)
def house() -> None:
    pass


@click.group()
def kitchen() -> None:
    pass


kitchen.add_command(cook)
house.add_command(kitchen)
name_variables(kitchen, ["house", "kitchen"])


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path at which the user's settings file is expected."""
    monkeypatch.delenv(FILE_VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "wattfleet").mkdir()
    return tmp_path / "wattfleet" / "config.toml"


def cooked(*arguments: str, **variables: str) -> str:
    result = CliRunner().invoke(house, ["kitchen", "cook", *arguments], env=variables, prog_name="house")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output.strip()


def wattfleet(*arguments: str, **variables: str) -> Result:
    result = CliRunner().invoke(cli.wattfleet, arguments, env={"COLUMNS": "200", **variables}, prog_name="wattfleet")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_an_option_overrides_a_variable_which_overrides_the_file(file: Path) -> None:
    assert cooked() == "1 False  None False"
    file.write_text("[kitchen.cook]\noven_w = 2\nfan = true\nguest = ['ann', 'bob']\ntin = '~/tin'")
    assert cooked(HOME="/home/ann") == "2 True ann bob /home/ann/tin False"
    variables = {
        "HOUSE_KITCHEN_COOK_OVEN_W": "3",
        "HOUSE_KITCHEN_COOK_FAN": "no",
        "HOUSE_KITCHEN_COOK_GUEST": "cy di",
        "HOUSE_KITCHEN_COOK_TIN": "tin",
        "HOUSE_KITCHEN_COOK_BURN": "yes",
    }
    assert cooked(**variables) == "3 False cy di tin False"
    assert cooked("--oven-w", "4", "--guest", "eve", **variables) == "4 False eve tin False"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[kitchen.cook]\noven = 2", "unknown key in [kitchen.cook]: 'oven'; did you mean 'oven_w'?"),
        ("[kitchen.cook]\nburn = true", "unknown key in [kitchen.cook]: 'burn'; use one of oven_w, fan, guest, tin,"),
        ("[kitchen.bake]\noven_w = 2", "unknown table in [kitchen]: 'bake'; use one of cook, or remove it"),
        ("[kitchn.cook]\noven_w = 2", "unknown table: 'kitchn'; did you mean 'kitchen'?"),
        ("[connection]\naddress = 'here'", "unknown key in [connection]: 'address'; use one of coordinator, identity"),
        ("[kitchen.cook]\nidentity = 'here'", "identity in [kitchen.cook]: put it into [connection]"),
        ("kitchen = 'warm'", "kitchen must be a table, [kitchen]"),
        ("[kitchen]\ncook = 'warm'", "kitchen.cook must be a table, [kitchen.cook]"),
        ("[kitchen.cook]\nguest = 'ann'", "guest in [kitchen.cook] must be a list, not 'ann'"),
        ("[kitchen.cook]\nfan = 1", "fan in [kitchen.cook] must be true or false, not 1"),
        ("[kitchen.cook]\noven_w = [1]", "oven_w in [kitchen.cook] must be a text or a number, not [1]"),
        ("[kitchen.cook", "is not valid TOML"),
    ],
)
def test_what_the_file_must_not_hold_is_refused_with_its_remedy(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidInputError) as refused:
        cooked("--oven-w", "5")
    assert str(file) in str(refused.value)
    assert message in str(refused.value)


def test_a_refused_value_is_traced_to_the_file(file: Path) -> None:
    file.write_text("[kitchen.cook]\noven_w = 'hot'")
    assert f"'hot' is not a valid integer (in {file})" in cooked()
    assert "in " + str(file) not in cooked("--oven-w", "cold")


def test_a_file_that_is_named_must_exist_and_an_empty_name_is_no_file(file: Path, tmp_path: Path) -> None:
    file.write_text("[kitchen.cook]\noven_w = 2")
    assert cooked().startswith("2 ")
    assert cooked(**{FILE_VARIABLE: ""}).startswith("1 ")
    with pytest.raises(InvalidInputError, match="cannot read the settings file .*: No such file"):
        cooked(**{FILE_VARIABLE: str(tmp_path / "none.toml")})


@needs_all
def test_coordinator_and_identity_are_named_once_for_all_commands(file: Path, tmp_path: Path) -> None:
    file.write_text(f"[connection]\ncoordinator = '127.0.0.1:1'\nidentity = '{tmp_path / 'keys'}'")
    for command in (["devices"], ["runs"], ["budget", "show"], ["reference", "list"], ["drain", "nano"]):
        with pytest.raises(InvalidInputError, match="keys has no identity"):
            wattfleet("coordinator", *command)
    file.write_text("[connection]\ncoordinator = 'port:-1'\ninsecure = true")
    with pytest.raises(InvalidInputError, match="port:-1"):
        wattfleet("coordinator", "devices")
    with pytest.raises(InvalidInputError, match="port:-2"):
        wattfleet("coordinator", "devices", WATTFLEET_COORDINATOR="port:-2")
    with pytest.raises(InvalidInputError, match="port:-3"):
        wattfleet("coordinator", "devices", "--coordinator", "port:-3", WATTFLEET_COORDINATOR="port:-2")


@needs_all
def test_daemons_read_neither_the_file_nor_variables_of_other_commands(file: Path) -> None:
    file.write_text("[coordinator.serve]\naddress = '127.0.0.1:1'")
    others = {
        "WATTFLEET_COORDINATOR_DEVICES_TAG": "lab",
        "WATTFLEET_COORDINATOR_STORE_CHECK_JSON": "yes",
        "WATTFLEET_AGENT_PROFILE_SEED": "7",
        "WATTFLEET_AGENT_PROFILE_TOLERANCE": "0.5",
    }
    assert "127.0.0.1:7070" in wattfleet("coordinator", "serve", "--print-config", **others).output
    assert "tolerance = 0.5" in wattfleet("agent", "run", "--print-config", **others).output
    with pytest.raises(InvalidInputError, match="did you mean 'WATTFLEET_COORDINATOR_DEVICES_TAG'"):
        wattfleet("coordinator", "serve", "--print-config", WATTFLEET_COORDINATOR_DEVICES_TAGG="lab")
    with pytest.raises(InvalidInputError, match=r"\[coordinator.serve\] is not read.*--config"):
        wattfleet("coordinator", "devices")


def _leaves(command: click.Command) -> Iterator[click.Command]:
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from _leaves(each)
    else:
        yield command


@needs_all
def test_each_variable_belongs_to_one_option_and_none_to_a_one_shot() -> None:
    root = click.Context(cli.wattfleet, info_name="wattfleet")
    names: list[str] = []
    of_daemons: set[str] = set()
    for name in cli.wattfleet.list_commands(root):
        command = cli.wattfleet.get_command(root, name)
        assert command is not None
        names += [each for each in variables_of(command) if each != "WATTFLEET_IDENTITY"]
        for leaf in _leaves(command):
            parameters = leaf.get_params(click.Context(leaf, info_name=leaf.name, parent=root))
            if isinstance(leaf, SettingsCommand):
                of_daemons |= {str(each.envvar) for each in parameters if each.envvar}
                continue
            for each in parameters:
                assert not (each.envvar and ONE_SHOT & set(each.opts)), each.opts
                assert each.envvar or not isinstance(each, click.Option) or not each.allow_from_autoenv or each.is_eager
    names.remove("WATTFLEET_COORDINATOR")  # that of `flower connect`, which declares it itself
    assert len(names) == len(set(names)) > 200
    assert set(names) & of_daemons == BOTH_READ
