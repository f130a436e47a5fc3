"""Counts the rows that reach each matrix product of a DeepSeek model, by the name of its weight.

It stands where weights are turned into products, below everything that decides what is computed, and so knows nothing
of positions, truncation or the model's own counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor

from deepinfer_kernels import LinearWeight
from deepinfer_workers.models.deepseek import model as model_module
from deepinfer_workers.models.deepseek.model import Deepseek
from deepinfer_workers.models.deepseek.weights import DeepseekWeights, Linear


class ProductRows:
    """Rows by name since the last `take`; all routed experts of a layer under one name."""

    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()

    def take(self) -> dict[str, int]:
        rows = {name: count for name, count in self._rows.items() if count}
        self._rows.clear()
        return rows

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Models loaded meanwhile are counted for as long as they live; their heads only after `watch_head`."""
        rows = self

        class Watched(DeepseekWeights):
            def linear(self, name: str) -> Linear:
                return rows._counted(name, super().linear(name))

            def plain_linear(self, name: str) -> Linear:
                return rows._counted(name, super().plain_linear(name))

        with mock.patch.object(model_module, "DeepseekWeights", Watched):
            yield

    def watch_head(self, model: Deepseek) -> None:
        project = model._ops.project

        def counted(x: Tensor, weight: LinearWeight) -> Tensor:
            self._rows["head"] += len(x)
            return project(x, weight)

        model._ops = replace(model._ops, project=counted)

    def _counted(self, name: str, product: Any) -> Linear:
        parts = name.split(".")
        if "experts" in parts:
            del parts[parts.index("experts") + 1]
        key = ".".join(parts).removesuffix(".weight")

        def counted(x: Tensor) -> Tensor:
            self._rows[key] += len(x)
            out: Tensor = product(x)
            return out

        return counted
