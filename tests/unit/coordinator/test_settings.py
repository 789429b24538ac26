import importlib
from pathlib import Path

import pytest

from coordinator.cli.commands import ServeCommand
from coordinator.server import policy_of, selection_of, site_of
from coordinator.settings import (
    ENVIRONMENT_PREFIX,
    CoordinatorSettings,
    PolicySettings,
    SelectionSettings,
    SiteSettings,
)
from wattfleet.errors import InvalidInputError
from wattfleet.planning import Selection
from wattfleet.planning.policies import POLICIES, AllDevices, Deadline, FastestK, Policy, Progress
from wattfleet_io.settings.model import keys_of, load
from wattfleet_io.settings.toml_text import as_toml


def test_every_policy_can_be_chosen_and_the_default_is_progress() -> None:
    for name in POLICIES:
        settings = PolicySettings.model_validate({"name": name, "deadline_s": 60.0 if name == "deadline" else None})
        assert policy_of(settings).name == name
    assert policy_of(PolicySettings()) == Progress()
    with pytest.raises(InvalidInputError, match="unknown policy 'best': choose one of fastest-k, "):
        policy_of(PolicySettings(name="best"))


def test_a_policy_gets_its_parameters() -> None:
    assert policy_of(PolicySettings(name="fastest-k", clients=2)) == FastestK(2)
    with pytest.raises(InvalidInputError, match="policy 'all' does not take tiers"):
        policy_of(PolicySettings(name="all", tiers=3))


def test_a_site_needs_exactly_one_of_a_budget_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text("[supplies.house]\nbudget = { watts = 40.0 }")
    assert site_of(SiteSettings(budget_w=3.0)).supplies.names == ("site",)
    assert site_of(SiteSettings(file=file)).supplies.names == ("house",)
    for settings in (SiteSettings(), SiteSettings(budget_w=3.0, file=file)):
        with pytest.raises(InvalidInputError, match="^pass exactly one of --site-budget-w, --site-file$"):
            site_of(settings)


@pytest.mark.parametrize("policy", [Progress(), AllDevices(), Deadline(60.0)])
def test_over_selection_needs_a_policy_with_a_number_of_devices(policy: Policy) -> None:
    settings = SelectionSettings(over_selection=0.2)
    with pytest.raises(InvalidInputError, match=f"policy '{policy.name}' determines the number of devices itself"):
        selection_of(settings, policy)
    for counted in (Progress(count=4), FastestK()):
        assert selection_of(settings, counted) == Selection(over_selection=0.2)


@pytest.mark.parametrize(
    ("option", "key", "value", "message"),
    [
        ("--keep-days", "store.keep_days", 0.0, "--keep-days must be above 0, not 0"),
        ("--profile-modes", "profiling.modes", 4, "--profile-modes must be 5 or more, not 4"),
        ("--seed", "policy.seed", -1, "--seed must be 0 or more, not -1"),
    ],
)
def test_a_value_out_of_range_is_refused(option: str, key: str, value: float, message: str) -> None:
    assert option in {each.option for each in keys_of(CoordinatorSettings) if each.path == key}
    with pytest.raises(InvalidInputError) as refused:
        load(CoordinatorSettings, ENVIRONMENT_PREFIX, {key: value})
    assert str(refused.value) == message


def test_the_printed_defaults_are_read_back_as_the_defaults(tmp_path: Path) -> None:
    loaded = load(CoordinatorSettings, ENVIRONMENT_PREFIX)
    path = tmp_path / "coordinator.toml"
    path.write_text(as_toml(loaded, "wattfleet coordinator serve"))
    assert load(CoordinatorSettings, ENVIRONMENT_PREFIX, {}, path).settings == loaded.settings == CoordinatorSettings()


def test_every_setting_is_described_and_the_command_reads_this_model() -> None:
    for key in keys_of(CoordinatorSettings):
        assert key.description.endswith("."), key.path
        assert key.name.endswith("_s") == (key.unit == "s") or key.unit == "1/s", key.path
    assert ServeCommand.settings_model() is CoordinatorSettings
    assert ServeCommand.prefix == ENVIRONMENT_PREFIX
    assert importlib.import_module("coordinator.settings").CoordinatorSettings is CoordinatorSettings
