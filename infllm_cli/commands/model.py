"""`infllm model`: list, fetch and describe models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from infllm_cli.interrupts import clean_end
from infllm_cli.options import Cache, Quiet

group = typer.Typer(help="List, fetch and describe models.", no_args_is_help=True)


@group.command("list")
def list_models(cache_dir: Cache = None) -> None:
    """The models known by name, and those converted here."""
    from infllm_cli.models.catalog import installed

    for model in installed(_cache(cache_dir)):
        size = model.size_bytes if model.present else model.download_bytes
        state = "here" if model.present else "to fetch"
        sys.stdout.write(f"{model.name}\t{state}\t{size / 1e6:.0f} MB\t{model.description}\n")
    sys.stdout.write("Also: a hub id (org/name), a local folder, a GGUF file.\n")


@group.command("pull")
def pull(
    model: Annotated[
        str | None,
        typer.Argument(help="Name, hub id or GGUF file; default: the default model and encoder."),
    ] = None,
    cache_dir: Cache = None,
    quiet: Quiet = False,
) -> None:
    """Fetch and convert a model, so that the first question need not wait for it."""
    from infllm_cli.console import open_console
    from infllm_cli.models.catalog import DEFAULT_MODEL, resolve
    from infllm_cli.models.encoders import DEFAULT_ENCODER, resolve_encoder

    console, cache = open_console(quiet=quiet), _cache(cache_dir)
    names = [DEFAULT_MODEL, DEFAULT_ENCODER] if model is None else [model]
    with clean_end(console):
        for name in names:
            if name.strip().lower() == DEFAULT_ENCODER:
                path = resolve_encoder(name, cache, console.fetching)
            else:
                path = resolve(name, cache, console.fetching).path
            sys.stdout.write(f"{path}\n")


@group.command("show")
def show(
    model: Annotated[str, typer.Argument(help="Name, hub id, folder or GGUF file.")],
    cache_dir: Cache = None,
) -> None:
    """What is known of a model; fetches nothing."""
    from infllm_cli.models.catalog import describe

    for key, value in describe(model, _cache(cache_dir)).items():
        if value is not None:
            sys.stdout.write(f"{key}\t{value}\n")


def _cache(cache_dir: Path | None) -> Path:
    from infllm_cli.models.catalog import default_cache_dir

    return cache_dir or default_cache_dir()


def add_to(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(group, name="model", rich_help_panel=None)
