"""One command of `infllm eval`: load, measure what is missing, report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from infllm_cli.evaluate import chart_files, oracle_report
from infllm_cli.evaluate.flags import at_least, parse_lengths, parse_names
from infllm_cli.evaluate.grid import Deadline, Form, Grid, GridRunner, TimeIsUp
from infllm_cli.evaluate.oracle import OracleRunner
from infllm_cli.evaluate.pictures import sheet_of
from infllm_cli.evaluate.results import Results
from infllm_cli.evaluate.tables import grid_table
from infllm_cli.evaluate.tasks.base import Task, evenly
from infllm_cli.evaluate.varied import vary
from infllm_cli.memory.config import Policy
from infllm_cli.models import catalog
from infllm_cli.models.loading import LoadedModel, load_model
from infllm_cli.sampling import Answering, AnswerOptions, Quoting
from infllm_cli.table_view import write_table
from infllm_cli.told import json_line

if TYPE_CHECKING:
    from infllm_cli.commands.groups import ModelFlags, TaskFlags
    from infllm_cli.console import Console


def measure(
    tasks: Sequence[Task],
    flags: TaskFlags,
    console: Console,
    out: TextIO,
    *,
    oracle: bool = False,
) -> None:
    """Measure tasks; a table on `out`, or with `--json` a line for each cell.

    Args:
        oracle: measure what lookups capture, not what the model answers.

    Raises:
        InfllmError: see the modules.
    """
    grid = grid_of(tasks, flags)
    limits = flags.parsed()
    results = Results(flags.output)
    chart_files.check_files(flags.heatmap or [])
    loaded = load(flags, console)
    deadline = Deadline(flags.limit_seconds)
    runner = (OracleRunner if oracle else GridRunner)(
        grid, loaded, results, console, flags.cache, limits, deadline
    )
    tell_found(results, runner.found, len(runner.cells), console)
    in_time = True
    try:
        runner.run()
    except TimeIsUp:
        in_time = False
    console.close()
    rows = runner.rows
    if rows:
        sheet = oracle_report.sheet_of(rows) if oracle else sheet_of(rows)
        for path in (flags.heatmap or []) if sheet is not None else []:
            chart_files.write(sheet, path)
        if flags.as_json:
            for row in rows:
                out.write(json_line(row, out))
        elif oracle:
            write_table(oracle_report.layer_table(rows), out)
            out.write("\n")
            write_table(oracle_report.count_table(rows), out)
        else:
            write_table(grid_table(rows), out)
        out.flush()
    if not in_time:
        tell_rest(flags.output, len(runner.cells) - len(rows), len(runner.cells), console)


def grid_of(tasks: Sequence[Task], flags: TaskFlags) -> Grid:
    """The grid that the flags describe.

    Raises:
        UsageError: a flag that cannot work.
    """
    at_least("--depths", flags.depths, 1)
    at_least("--samples", flags.samples, 1)
    if flags.limit_seconds is not None:
        at_least("--limit-seconds", flags.limit_seconds, 0)
    policies = [flags.policy or Policy.INFLLM]
    if flags.policies is not None:
        known = [policy.value for policy in Policy]
        policies = [Policy(name) for name in parse_names("--policies", flags.policies, known)]
    return Grid(
        tasks=tasks,
        lengths=parse_lengths(flags.lengths),
        depths=evenly(flags.depths),
        policies=vary(policies, flags.vary),
        samples=flags.samples,
        seed=flags.seed,
        options=AnswerOptions(
            answering=Answering(flags.answering.value),
            reread_tokens=flags.reread_tokens,
            encoder=flags.encoder,
            candidates=flags.candidates,
            quote=Quoting.NEVER,  # it is the model's own words that are scored
        ),
        form=Form(flags.form.value),
        sizes=flags.as_dict(),
    )


def load(model: ModelFlags, console: Console) -> LoadedModel:
    """The model, once for all policies."""
    console.stage("loading the model")
    name = model.model or catalog.DEFAULT_MODEL
    folder = catalog.resolve(name, model.cache, console.fetching)
    memo = model.cache / "selftest.json"
    return load_model(
        folder.path, folder.name, device=model.device, dtype=model.dtype.value, memo=memo
    )


def tell_found(results: Results, found: int, total: int, console: Console) -> None:
    """What need not be measured again."""
    if results.broken:
        console.note(f"{results.path}: its last line was torn off and has been dropped.")
    if found:
        console.note(
            f"{found} of {total} cells are in {results.path} already; they are not measured again."
        )


def tell_rest(path: Path | None, missing: int, total: int, console: Console) -> None:
    """What the limit of time has left over."""
    again = "the same command goes on from there" if path else "with --output it could go on later"
    console.note(f"time is up: {missing} of {total} cells are not measured; {again}.")
