"""The metrics listed in the documentation: their names, types, labels and help texts.

An agent's metrics are in a section of their own; the others are the coordinator's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
_ROW = re.compile(
    r"\| `(?P<name>wattfleet_\w+)` \| (?P<type>gauge|counter|histogram) \| (?P<labels>.*?) \| (?P<text>.+) \|"
)


@dataclass(frozen=True)
class DocumentedMetric:
    """One row of the page. Counters are listed with their suffix `_total`."""

    name: str
    type: str
    labels: frozenset[str]
    text: str

    @property
    def samples(self) -> dict[str, frozenset[str]]:
        """The names of its samples, each with its labels."""
        if self.type != "histogram":
            return {self.name: self.labels}
        beside = dict.fromkeys((f"{self.name}_count", f"{self.name}_sum"), self.labels)
        return {f"{self.name}_bucket": self.labels | {"le"}, **beside}


_OF_AGENTS = "\n## On the device itself\n"


def documented_metrics() -> list[DocumentedMetric]:
    """The rows of the coordinator's metrics, in order."""
    page = _PAGE.read_text()
    return _rows(page.replace(_section_of_agents(page), ""))


def documented_metrics_of_agents() -> list[DocumentedMetric]:
    """The rows of an agent's metrics, in order."""
    return _rows(_section_of_agents(_PAGE.read_text()))


def _section_of_agents(page: str) -> str:
    begin = page.index(_OF_AGENTS)
    return page[begin : page.index("\n## ", begin + 1)]


def _rows(text: str) -> list[DocumentedMetric]:
    return [
        DocumentedMetric(row["name"], row["type"], frozenset(re.findall(r"`(\w+)`", row["labels"])), row["text"])
        for row in _ROW.finditer(text)
    ]


def documented_samples() -> dict[str, frozenset[str]]:
    """The names of all samples, each with its labels."""
    return {name: labels for metric in documented_metrics() for name, labels in metric.samples.items()}
