"""`deepinfer inspect`: what a checkpoint holds, and the memory that its ranks need."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepinfer.cli.common import in_words
from deepinfer.inspection import Inspection, RankMemory, inspect_model
from deepinfer.shipped import find_shipped, shipped_folder

_FILES = {"none": "a config alone", "match": "files match the config", "differ": "files do not match the config"}


def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder with config.json, such a file, or a model that was shipped.")
    ],
    ep: Annotated[int, typer.Option(help="Ranks that hold the routed experts together.")] = 1,
    dp: Annotated[int, typer.Option(help="Groups of ranks that serve requests of their own.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Tensors and bytes of a DeepSeek checkpoint, or of one that a config describes, and the memory of every rank."""
    with in_words("inspect"):
        found = inspect_model(_place(path), num_ep=ep, num_dp=dp)
        if as_json:
            typer.echo(msgspec.json.encode(found).decode())
        else:
            _show(found, Console())
        found.check()


def _place(path: Path) -> Path:
    shipped = None if path.exists() else find_shipped(str(path))
    return path if shipped is None else shipped_folder(shipped) or path


def _show(found: Inspection, console: Console) -> None:
    kind = "FP8 and FP4" if found.is_quantized else "not quantised"
    title = f"{found.name}: DeepSeek {found.family.upper()}, {kind}, {_FILES[found.files]}"
    console.print(escape(title), soft_wrap=True)
    console.print(_inventory(found))
    console.print(_memory(found))
    for line in _beside(found):
        console.print(line, soft_wrap=True)


def _inventory(found: Inspection) -> Table:
    table = Table(show_footer=True)
    table.add_column("part", "all")
    table.add_column("tensors", f"{found.num_tensors:,}", justify="right")
    table.add_column("bytes", f"{found.num_bytes:,}", justify="right")
    for group in found.groups:
        table.add_row(group.name, f"{group.num_tensors:,}", f"{group.num_bytes:,}")
    return table


def _memory(found: Inspection) -> Table:
    unit, size = ("GB", 1e9) if found.ranks[0].num_bytes >= 1e8 else ("MB", 1e6)
    table = Table(title=f"{unit} of weights by rank", title_justify="left")
    for column in ("rank", "group", "experts", "dense", "routed", "together", "drafts", "vision"):
        table.add_column(column, justify="right")
    for _, ranks in groupby(found.ranks, key=_sizes):
        table.add_row(*_cells(list(ranks), size))
    return table


def _sizes(rank: RankMemory) -> tuple[int | None, ...]:
    """Ranks that have the same are told in one line."""
    return rank.dense_bytes, rank.expert_bytes, rank.draft_bytes, rank.vision_bytes


def _beside(found: Inspection) -> Iterator[str]:
    """What else takes memory, a line each."""
    shared = found.shared
    with_drafts = shared.slot_bytes + shared.draft_slot_bytes
    drafts = f" (with drafts {with_drafts:,})" if shared.draft_slot_bytes else ""
    caches = f"for every token {shared.token_bytes:,.0f} bytes, for every request {shared.slot_bytes:,}{drafts}"
    yield f"and {caches} of caches"
    yield f"and {shared.known_slot_bytes:,} of tokens and block numbers; once a rank {shared.rope_bytes:,} for RoPE"
    if any(rank.draft_bytes is None for rank in found.ranks):
        yield "drafts cannot be served by as many ranks, which do not divide the draft experts"
    if shared.table_bytes:
        yield f"n-gram tables, {shared.table_bytes:,} bytes, stay in mapped files, once a host"


def _cells(ranks: list[RankMemory], unit: float) -> list[str]:
    """A line for `ranks` of the same sizes."""
    first, last = ranks[0], ranks[-1]
    start, end = first.experts
    experts = f"{start}-{end - 1}" if first is last else f"{end - start} each"
    more = [f"+ {num_bytes / unit:,.1f}" if num_bytes else "-" for num_bytes in (first.draft_bytes, first.vision_bytes)]
    sizes = [f"{num_bytes / unit:,.1f}" for num_bytes in (first.dense_bytes, first.expert_bytes, first.num_bytes)]
    return [_from_to(first.rank, last.rank), _from_to(first.group, last.group), experts, *sizes, *more]


def _from_to(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
