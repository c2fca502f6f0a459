"""`infllm memory`: list, describe and remove saved memories."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from infllm_cli.options import Cache, MemoryBudget

group = typer.Typer(help="List, describe and remove saved memories.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="KEY", help="The beginning of a key suffices.")]


@group.command("list")
def list_memories(cache_dir: Cache = None) -> None:
    """The saved memories, the last used first."""
    from infllm_cli import memories

    sys.stdout.write(memories.listing(_cache(cache_dir)))


@group.command("show")
def show(key: Key, cache_dir: Cache = None) -> None:
    """What is known of a saved memory; checks its files."""
    from infllm_cli import memories

    sys.stdout.write(memories.description(_cache(cache_dir), key))


@group.command("rm")
def remove(
    keys: Annotated[list[str] | None, typer.Argument(metavar="KEY...")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    cache_dir: Cache = None,
) -> None:
    """Remove saved memories."""
    from infllm_cli import memories

    memories.remove(_cache(cache_dir), keys or [], every=every)


@group.command("prune")
def prune(memory_budget: MemoryBudget = "20GB", cache_dir: Cache = None) -> None:
    """Remove the least recently used memories until all fit the budget; prints what went."""
    from infllm_cli import machine, memories

    most = machine.parse_size(memory_budget, "--memory-budget")
    sys.stdout.write(memories.prune(_cache(cache_dir), most))


@group.command("path")
def path(
    key: Annotated[str | None, typer.Argument(metavar="KEY")] = None, cache_dir: Cache = None
) -> None:
    """The folder of a saved memory, or of all."""
    from infllm_cli import memories

    sys.stdout.write(f"{memories.path(_cache(cache_dir), key)}\n")


def _cache(cache_dir: Path | None) -> Path:
    from infllm_cli.models.catalog import default_cache_dir

    return cache_dir or default_cache_dir()


def add_to(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(group, name="memory", rich_help_panel=None)
