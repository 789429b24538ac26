import sys
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import typer
from click.testing import CliRunner, Result

from wattfleet.common.settings.command import SettingsCommand, effective
from wattfleet.common.settings.model import Group, Names, Settings, load, setting
from wattfleet.core.errors import InvalidInputError

PREFIX = "WATTFLEET_KITCHEN_"


class OvenSettings(Group):
    """The oven."""

    power_w: float = setting(2000.0, "Power of the oven.", unit="W", option="--power-w", gt=0, le=3500)
    bake_min: int | None = setting(None, "Time to bake.", unit="min", unset="until golden", ge=1)
    fan: bool = setting(False, "Run the fan.", option="--fan")


class MenuSettings(Group):
    """What is cooked."""

    dish: Literal["pie", "roast"] = setting("pie", "Dish to cook.", option="--dish")
    guests: Names = setting((), "People who come.", option="--guest")
    source: str = setting("recipes.db", "Where the recipes are.", option="--source")
    book: Path | None = setting(None, "A book of recipes.", option="--book")


class KitchenSettings(Settings):
    """A kitchen."""

    prefix: ClassVar[str] = PREFIX

    oven: OvenSettings = OvenSettings()
    menu: MenuSettings = MenuSettings()


class KitchenCommand(SettingsCommand):
    model = f"{__name__}:KitchenSettings"


app = typer.Typer()
cooked: list[KitchenSettings] = []


@app.callback()
def kitchen() -> None:
    """A kitchen."""


@app.command(cls=KitchenCommand)
def cook(ctx: typer.Context, quietly: bool = False) -> None:
    """Cook."""
    cooked.append(effective(ctx))


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(typer.main.get_command(app), ["cook", *arguments], env={"COLUMNS": "80"})
    if isinstance(result.exception, InvalidInputError):
        raise result.exception
    return result


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[KitchenSettings.__module__])
    cooked.clear()


def write(folder: Path, text: str) -> Path:
    path = folder / "kitchen.toml"
    path.write_text(text)
    return path


def test_options_override_the_environment_which_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "[oven]\npower_w = 1.0\nbake_min = 11\nfan = true\n[menu]\nsource = 'file'")
    monkeypatch.setenv(f"{PREFIX}OVEN_POWER_W", "2")
    monkeypatch.setenv(f"{PREFIX}OVEN_BAKE_MIN", "22")
    assert run("--config", str(path), "--power-w", "3").exit_code == 0
    assert cooked[0].oven == OvenSettings(power_w=3.0, bake_min=22, fan=True)
    assert cooked[0].menu == MenuSettings(source="file")

    printed = run("--config", str(path), "--power-w", "3", "--print-config").stdout
    for origin in ("--power-w", f"{PREFIX}OVEN_BAKE_MIN", path):
        assert f"Set by: {origin}.".replace(" ", "") in printed.replace("\n#", "").replace(" ", "")


def test_the_environment_can_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}CONFIG", str(write(tmp_path, "[oven]\nfan = true")))
    other = tmp_path / "other.toml"
    other.write_text("")
    run()
    run("--config", str(other))
    assert [each.oven.fan for each in cooked] == [True, False]


def test_the_constructor_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVEN", '{"fan": true}')
    monkeypatch.setenv(f"{PREFIX}OVEN_FAN", "true")
    assert not KitchenSettings().oven.fan


def test_lists_and_flags_come_from_options_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}MENU_GUESTS", "ann, bob")
    monkeypatch.setenv(f"{PREFIX}OVEN_FAN", "true")
    monkeypatch.setenv(f"{PREFIX}OVEN_POWER_W", "")  # Compose passes unset variables like this
    run("--book", "a.txt")
    run("--guest", "eve", "--guest", "joe", "--no-fan")
    assert [each.menu.guests for each in cooked] == [("ann", "bob"), ("eve", "joe")]
    assert [each.oven.fan for each in cooked] == [True, False]
    assert [each.oven.power_w for each in cooked] == [2000.0, 2000.0]
    assert cooked[0].menu.book == Path("a.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[oven]\nwatts = 3", "unknown key 'watts' in [oven]"),
        ("[oven]\npower = 3", "unknown key 'power' in [oven]; did you mean 'power_w'?"),
        ("[oven]\ndish = 'pie'", "unknown key 'dish' in [oven]; it belongs in [menu]"),
        ("[ovens]\nfan = true", "unknown table [ovens]; did you mean 'oven'?"),
        ("fan = true", "'fan' belongs in the table [oven]"),
        ("oven = 3", "[oven] must be a table"),
        ("[oven]\npower_w = 0", "[oven] power_w must be above 0, not 0"),
        ("[oven]\npower_w = 4000", "[oven] power_w must be 3500 or less, not 4000"),
        ("[oven]\nbake_min = 0", "[oven] bake_min must be 1 or more, not 0"),
        ("[oven]\npower_w = 'hot'", "[oven] power_w must be a number, not 'hot'"),
        ("[oven]\npower_w = nan", "[oven] power_w must be a finite number, not nan"),
        ("[oven]\nbake_min = 1.5", "[oven] bake_min must be a whole number, not 1.5"),
        ("[oven]\nfan = 'maybe'", "[oven] fan must be true or false, not 'maybe'"),
        ("[menu]\ndish = 'cake'", "[menu] dish must be 'pie' or 'roast', not 'cake'"),
        ("[menu]\nsource = 3", "[menu] source must be a text, not 3"),
        ("[menu]\nguests = [3]", "[menu] guests must be a text, not 3"),
        ("[menu]\nbook = 3", "[menu] book must be a path, not 3"),
    ],
)
def test_an_error_names_the_file_the_key_and_a_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InvalidInputError) as refused:
        load(KitchenSettings, path)
    assert str(refused.value) == f"{path}: {message}"


def test_an_error_names_the_option_or_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match=r"^--power-w must be above 0, not -1"):
        run("--power-w", "-1")
    with pytest.raises(InvalidInputError, match=r"^--power-w must be a number, not 'hot'"):
        run("--power-w", "hot")
    monkeypatch.setenv(f"{PREFIX}OVEN_BAKE_MIN", "soon")
    with pytest.raises(InvalidInputError, match=f"^{PREFIX}OVEN_BAKE_MIN must be a whole number, not 'soon'$"):
        run()


def test_a_variable_does_not_hide_that_the_file_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}OVEN_FAN", "true")
    path = write(tmp_path, "oven = 3")
    with pytest.raises(InvalidInputError, match=f"^{path}: \\[oven\\] must be a table$"):
        run("--config", str(path))


def test_an_unknown_variable_is_refused_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kubernetes sets these variables for a service of that name.
    monkeypatch.setenv(f"{PREFIX}SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv(f"{PREFIX}PORT_7070_TCP_ADDR", "10.0.0.1")
    run()
    monkeypatch.setenv(f"{PREFIX}OVEN_POWER", "3")
    with pytest.raises(InvalidInputError, match=f"{PREFIX}OVEN_POWER; did you mean '{PREFIX}OVEN_POWER_W'"):
        run()


@pytest.mark.parametrize(
    ("text", "why"),
    [("a = " + "[" * 100_000, "nested too deeply"), ("a = " + "9" * 5000, "integer .* too many digits")],
)
def test_a_settings_file_that_breaks_a_parser_is_refused_in_one_line(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "kitchen.toml").write_text(text)
    with pytest.raises(InvalidInputError, match=f"kitchen.toml is not valid TOML: .*{why}") as refused:
        load(KitchenSettings, tmp_path / "kitchen.toml")
    assert len(str(refused.value)) < 500


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot read the settings file .*absent: No such file or directory"):
        load(KitchenSettings, tmp_path / "absent")
    with pytest.raises(InvalidInputError, match="cannot read the settings file .*: Is a directory"):
        load(KitchenSettings, tmp_path)
    with pytest.raises(InvalidInputError, match="kitchen.toml is not valid TOML: Expected"):
        load(KitchenSettings, write(tmp_path, "[oven"))


def test_the_help_shows_each_option_with_its_default() -> None:
    text = " ".join(run("--help").stdout.split())
    for shown in (
        "Power of the oven. Default: 2000.",
        "--fan / --no-fan Run the fan. Default: no.",
        "[pie|roast] Dish to cook. Default: pie.",
        "People who come. Default: none.",
        f"Default: {PREFIX}CONFIG, else no file.",
        "--print-config",
        "--quietly",
    ):
        assert shown in text
    assert "--oven-bake" not in text and "Time to bake" not in text
    assert run("--oven-bake-min", "3").exit_code == 2


def test_printed_settings_explain_themselves_and_can_be_read_back(tmp_path: Path) -> None:
    path = write(tmp_path, "[oven]\npower_w = 1500.5\n[menu]\nguests = ['ann', 'bob']\nsource = 'a\"b'")
    printed = run("--config", str(path), "--dish", "roast", "--print-config")
    assert printed.exit_code == 0 and not cooked
    assert max(map(len, printed.stdout.splitlines())) <= max(80, len(str(path)) + 12)
    assert "# Power of the oven.\n# Unit: W. Default: 2000. Set by:" in printed.stdout
    assert "# Time to bake.\n# Unit: min. Default: until golden. Not changed.\n# bake_min =\n" in printed.stdout
    assert 'Set by: --dish.\ndish = "roast"\n' in printed.stdout
    assert "# The oven.\n[oven]\n" in printed.stdout
    again = tmp_path / "again.toml"
    again.write_text(printed.stdout)
    run("--config", str(again))
    run("--config", str(path), "--dish", "roast")
    assert cooked[0] == cooked[1]


def test_printed_settings_hold_no_password(tmp_path: Path) -> None:
    path = write(tmp_path, "[menu]\nsource = 'postgresql://cook:secret@db/recipes'")
    assert 'source = "postgresql://cook:***@db/recipes"' in run("--config", str(path), "--print-config").stdout


def test_a_copy_with_other_values_is_checked() -> None:
    settings = KitchenSettings(oven=OvenSettings(fan=True))
    other = settings.with_values(oven={"power_w": 5})
    assert other.oven == OvenSettings(fan=True, power_w=5.0) and settings.oven.power_w == 2000.0
    with pytest.raises(ValueError):
        settings.with_values(oven={"power_w": 0})


@pytest.mark.parametrize("url", ["postgresql://cook:secret@db/recipes", "postgresql://cook@db/recipes?password=secret"])
def test_a_password_on_the_command_line_is_refused_and_not_repeated(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="--source: a password on the command line") as refused:
        run("--source", url)
    assert "secret" not in str(refused.value) and not cooked
    path = write(tmp_path, f"[menu]\nsource = '{url}'")
    assert run("--config", str(path), "--dish", "roast").exit_code == 0


def test_a_wrong_value_with_a_password_is_not_repeated(tmp_path: Path) -> None:
    path = write(tmp_path, "[menu]\nsource = ['postgresql://cook:secret@db/recipes']")
    with pytest.raises(InvalidInputError, match="must be a text") as refused:
        load(KitchenSettings, path)
    assert "secret" not in str(refused.value)
