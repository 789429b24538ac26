import pytest

from edge_agent.devices.jetson.nvpmodel_conf import NvpmodelConfError, parse_conf
from wattfleet.errors import InvalidInputError

CONF = """\
# NVIDIA's, shortened

< PARAM TYPE=FILE NAME=CPU_ONLINE >
CORE_0 /sys/devices/system/cpu/cpu0/online
CORE_1 /sys/devices/system/cpu/cpu1/online

< PARAM TYPE=FILE NAME=GPU_POWER_CONTROL_DISABLE >
GPU_PWR_CNTL_DIS /sys/devices/gpu.0/power/control

< PARAM TYPE=CLOCK NAME=EMC >
MAX_FREQ /sys/kernel/nvpmodel_emc_cap/emc_iso_cap

< POWER_MODEL ID=3 NAME=10W >
CPU_ONLINE CORE_0 1
CPU_ONLINE CORE_1 0
EMC MAX_FREQ 1065600000

< POWER_MODEL ID=0 NAME=MAXN >
CPU_ONLINE CORE_0 1   # always
CPU_ONLINE CORE_1 1
GPU_POWER_CONTROL_DISABLE GPU_PWR_CNTL_DIS auto
EMC MAX_FREQ -1

< FAN_CONFIG DEFAULT=quiet >
< PM_CONFIG DEFAULT=3 >
"""


def test_modes_come_in_the_order_of_their_numbers_with_all_they_set():
    conf = parse_conf(CONF, "nvpmodel.conf")
    assert [(mode.mode_id, mode.name) for mode in conf.modes] == [(0, "MAXN"), (3, "10W")]
    assert conf.default == 3
    assert conf.paths["EMC", "MAX_FREQ"] == "/sys/kernel/nvpmodel_emc_cap/emc_iso_cap"
    assert list(conf.mode_of_name("MAXN").settings.items()) == [
        (("CPU_ONLINE", "CORE_0"), "1"),
        (("CPU_ONLINE", "CORE_1"), "1"),
        (("GPU_POWER_CONTROL_DISABLE", "GPU_PWR_CNTL_DIS"), "auto"),
        (("EMC", "MAX_FREQ"), "-1"),
    ]


def test_a_mode_more_leaves_no_gap_between_the_numbers_and_keeps_the_others():
    conf = parse_conf(CONF, "nvpmodel.conf")
    more = conf.with_mode("OURS", {("EMC", "MAX_FREQ"): "204000000"})
    assert [(mode.mode_id, mode.name) for mode in more.modes] == [(0, "MAXN"), (1, "10W"), (2, "OURS")]
    assert more.mode_of_id(more.default).name == "10W"
    assert more.mode_of_name("10W").settings == conf.mode_of_name("10W").settings


def test_what_is_written_is_what_was_meant():
    conf = parse_conf(CONF, "nvpmodel.conf").with_mode("OURS", {("CPU_ONLINE", "CORE_1"): "0"})
    assert parse_conf(conf.text(), "copy") == conf


def test_stanzas_begin_in_the_first_column_and_use_spaces():
    text = parse_conf(CONF, "nvpmodel.conf").text()
    assert "\n< POWER_MODEL ID=3 NAME=10W >\n" in text
    assert text.endswith("< PM_CONFIG DEFAULT=3 >\n")


def test_a_mode_that_is_not_there_is_answered_with_those_that_are():
    conf = parse_conf(CONF, "nvpmodel.conf")
    with pytest.raises(InvalidInputError, match=r"no mode '15W'; choose one of MAXN \(0\), 10W \(3\)"):
        conf.mode_of_name("15W")
    with pytest.raises(InvalidInputError, match="no mode 1;"):
        conf.mode_of_id(1)


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ("< POWER_MODEL ID=0 NAME=MAXN >", "< POWER_MODEL ID=0 NAME=MAXN", 18, "is not a stanza"),
        ("< POWER_MODEL ID=0 NAME=MAXN >", "< POWER_MODEL NAME=MAXN >", 18, "lacks ID="),
        ("< POWER_MODEL ID=0 NAME=MAXN >", "< POWER_MODEL ID=0 >", 18, "lacks NAME="),
        ("< POWER_MODEL ID=0 NAME=MAXN >", "< POWER_MODEL ID=3 NAME=MAXN >", 18, "repeats the ID 3"),
        ("< POWER_MODEL ID=0 NAME=MAXN >", "< POWER_MODEL ID=x NAME=MAXN >", 18, "has 'x' instead of a number"),
        ("EMC MAX_FREQ 1065600000", "EMC MAX_FREQ fast", 16, "has 'fast' instead of a number"),
        ("EMC MAX_FREQ 1065600000", f"EMC MAX_FREQ {'9' * 4_301}", 16, "has a number of 4,301 characters"),
        ("EMC MAX_FREQ 1065600000", "EMC MAX_FREQ", 16, "is not a parameter, an argument and a value"),
        ("EMC MAX_FREQ 1065600000", "EMC MIN_FREQ 1", 16, "sets EMC MIN_FREQ, which no earlier PARAM defines"),
        ("NAME=EMC", "NAME=CPU_ONLINE", 10, "repeats the parameter CPU_ONLINE"),
        ("TYPE=CLOCK", "TYPE=WATCH", 10, "has the TYPE WATCH; use one of FILE, CLOCK"),
        ("MAX_FREQ /sys/kernel/nvpmodel_emc_cap/emc_iso_cap", "MAX_FREQ", 11, "is not an argument and a path"),
        ("# NVIDIA's, shortened", "CORE_0 /sys", 1, "is outside any stanza"),
        ("< FAN_CONFIG DEFAULT=quiet >", "< SECRETS A=b >", 24, "begins an unknown stanza SECRETS"),
    ],
)
def test_a_line_that_cannot_be_understood_is_named(old, new, line, what):
    with pytest.raises(NvpmodelConfError) as refused:
        parse_conf(CONF.replace(old, new), "/etc/nvpmodel.conf")
    assert str(refused.value).startswith(f"/etc/nvpmodel.conf, line {line}: {what}")


@pytest.mark.parametrize(
    ("text", "what"),
    [("", "has no POWER_MODEL"), (CONF.replace("< PM_CONFIG DEFAULT=3 >", ""), "has no PM_CONFIG")],
)
def test_a_configuration_that_nvpmodel_would_refuse_is_refused(text, what):
    with pytest.raises(NvpmodelConfError, match=what):
        parse_conf(text, "nvpmodel.conf")
