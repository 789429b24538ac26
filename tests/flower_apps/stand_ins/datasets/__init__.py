"""Stands in for Hugging Face's `datasets`: a few hundred made-up rows under the names of the sets that examples load.

The classes of a made-up set can be learned, so that an accuracy that rises means that training works.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

ROWS = 960
"""Rows of each training split; a test split has a quarter."""


class Dataset:
    """Rows of named columns, with the methods that Flower's examples call."""

    def __init__(
        self, columns: Mapping[str, Any], kind: str = "", transform: Callable[[dict[str, Any]], Any] | None = None
    ) -> None:
        self.columns = dict(columns)
        self._kind = kind
        self._transform = transform

    @classmethod
    def from_pandas(cls, frame: Any) -> Dataset:
        return cls({name: frame[name].to_numpy() for name in frame.columns})

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), len(self.columns)

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __iter__(self) -> Iterator[Any]:
        return (self[k] for k in range(len(self)))

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, str):
            return self._formatted(self.columns[which])
        if isinstance(which, (int, np.integer)):
            if which >= len(self):
                raise IndexError(which)
            row = self[[int(which)]]
            return {name: values[0] for name, values in row.items()}
        chosen = {name: values[which] for name, values in self.columns.items()}
        if self._transform is not None:
            # Images become pictures' arrays one by one, as those of the real library.
            return self._transform({name: list(values) for name, values in chosen.items()})
        if self._kind == "pandas":
            return self._with(chosen).to_pandas()
        return {name: self._formatted(values) for name, values in chosen.items()}

    def __getitems__(self, which: Sequence[int]) -> list[dict[str, Any]]:
        """Rows of a batch, as torch's loader reads them."""
        batch = self[list(which)]
        return [{name: values[k] for name, values in batch.items()} for k in range(len(which))]

    def _formatted(self, values: Any) -> Any:
        return values if self._kind in ("numpy", "jax") else list(values)

    def _with(self, columns: Mapping[str, Any]) -> Dataset:
        return Dataset(columns, self._kind, self._transform)

    def select(self, rows: Any) -> Dataset:
        rows = np.asarray(rows)
        return self._with({name: values[rows] for name, values in self.columns.items()})

    def train_test_split(self, test_size: float = 0.25, train_size: float | None = None, seed: int = 0) -> DatasetDict:
        share = test_size if train_size is None else 1 - train_size
        rows = np.random.default_rng(seed).permutation(len(self))
        first = round((1 - share) * len(self))
        return DatasetDict({"train": self.select(rows[:first]), "test": self.select(rows[first:])})

    def shuffle(self, seed: int = 0, **_: Any) -> Dataset:
        return self.select(np.random.default_rng(seed).permutation(len(self)))

    def batch(self, size: int, drop_last_batch: bool = False, **_: Any) -> Dataset:
        ends = range(size, len(self) + (0 if drop_last_batch else size), size)
        columns = {}
        for name, values in self.columns.items():
            column = np.empty(len(ends), dtype=object)
            column[:] = [values[end - size : end] for end in ends]
            columns[name] = column
        return self._with(columns)

    def with_transform(self, transform: Callable[[dict[str, Any]], Any]) -> Dataset:
        return Dataset(self.columns, self._kind, transform)

    def set_format(self, type: str = "", **_: Any) -> None:  # noqa: A002
        self._kind = type

    def with_format(self, type: str = "", **_: Any) -> Dataset:  # noqa: A002
        return Dataset(self.columns, type, self._transform)

    def to_pandas(self) -> Any:
        import pandas

        return pandas.DataFrame({name: list(values) for name, values in self.columns.items()})


class DatasetDict(dict[str, Dataset]):
    """Splits of a set."""

    def with_transform(self, transform: Callable[[dict[str, Any]], Any]) -> DatasetDict:
        return DatasetDict({name: each.with_transform(transform) for name, each in self.items()})

    def set_format(self, type: str = "", **_: Any) -> None:  # noqa: A002
        for each in self.values():
            each.set_format(type)


def concatenate_datasets(sets: Sequence[Dataset]) -> Dataset:
    return Dataset({name: np.concatenate([each.columns[name] for each in sets]) for name in sets[0].columns})


def load_dataset(name: str, *_: Any, split: str | None = None, **__: Any) -> Any:
    splits = DatasetDict({"train": _made(name, ROWS, "train"), "test": _made(name, ROWS // 4, "test")})
    return splits if split is None else splits[split]


def _made(name: str, rows: int, split: str) -> Dataset:
    centres = np.random.default_rng(zlib.crc32(name.encode()))
    rng = np.random.default_rng(zlib.crc32(f"{name} {split}".encode()))
    if "iris" in name:
        label = rng.integers(0, 3, rows)
        measures = 3.0 + 2 * centres.random((3, 4))[label] + 0.3 * rng.normal(size=(rows, 4))
        lower = ("sepal_length", "sepal_width", "petal_length", "petal_width")
        upper = ("SepalLengthCm", "SepalWidthCm", "PetalLengthCm", "PetalWidthCm")
        names = upper if name.startswith("scikit-learn") else lower
        return Dataset({**dict(zip(names, measures.T, strict=True)), "species": label})
    if "higgs" in name:
        label = rng.integers(0, 2, rows)
        return Dataset(
            {"inputs": centres.normal(size=(2, 28))[label] / 4 + rng.normal(size=(rows, 28)), "label": label}
        )
    if "census" in name:
        return _census(rng, rows)
    colour = "cifar" in name
    label = rng.integers(0, 10, rows)
    size = (32, 32, 3) if colour else (28, 28)
    images = centres.integers(0, 256, (10, *size))[label] * 0.5 + rng.integers(0, 128, (rows, *size))
    return Dataset({"img" if colour else "image": images.astype(np.uint8), "label": label})


def _census(rng: np.random.Generator, rows: int) -> Dataset:
    names = ("workclass", "education", "marital.status", "occupation", "relationship", "race", "sex", "native.country")
    words = {each: rng.integers(0, 4, rows) for each in names}
    numbers = ("age", "fnlwgt", "education.num", "capital.gain", "capital.loss", "hours.per.week")
    measured = {each: rng.normal(40, 10, rows).round() for each in numbers}
    earns = measured["age"] + 5 * words["education"] + rng.normal(0, 5, rows) > 48
    text = {name: np.array([f"{name}-{k}" for k in values], dtype=object) for name, values in words.items()}
    return Dataset(
        {**measured, **text, "income": np.array([">50K" if each else "<=50K" for each in earns], dtype=object)}
    )
