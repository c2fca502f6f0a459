"""One knob at several values, side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_eval_grid import grid_of, runner_of
from tiny_readers import make_reader

from infllm_cli.errors import UsageError
from infllm_cli.evaluate.pictures import sheet_of
from infllm_cli.evaluate.tables import as_text, grid_table
from infllm_cli.evaluate.tasks import filler
from infllm_cli.evaluate.varied import Varied, changes_of, vary
from infllm_cli.memory.config import Policy
from infllm_cli.memory.knobs import Relevance

PAPER = Policy.INFLLM_PAPER


def test_without_a_knob_policies_stay_as_they_are():
    assert vary([Policy.INFLLM, Policy.DENSE], None) == [Policy.INFLLM, Policy.DENSE]
    assert changes_of(Policy.DENSE) == {"policy": Policy.DENSE}


def test_a_knob_is_called_by_its_flag_and_its_values_are_checked():
    blocks = vary([Policy.INFLLM, PAPER], "--blocks=1, 4,4")
    assert [one.value for one in blocks] == [
        "infllm, blocks 1",
        "infllm, blocks 4",
        "infllm-paper, blocks 1",
        "infllm-paper, blocks 4",
    ]
    assert changes_of(blocks[1]) == {"policy": Policy.INFLLM, "answer_blocks": 4}
    (one,) = vary([PAPER], "relevance=max")
    assert one == Varied(PAPER, "relevance", Relevance.MAX) and one.has_blocks
    assert one.value == "infllm-paper, relevance max"
    for wrong in ("colour=1", "blocks=many", "relevance=loud", "policy=dense", "blocks", ""):
        with pytest.raises(UsageError, match="--vary"):
            vary([Policy.INFLLM], wrong)


def test_each_value_reads_and_answers_with_its_own_memory(tmp_path):
    loaded = make_reader().loaded
    task = replace(filler.passkey(), max_tokens=2)
    systems = vary([Policy.INFLLM], "block=8,16")
    grid = grid_of(tasks=[task], policies=systems)
    grid = replace(grid, sizes={k: v for k, v in grid.sizes.items() if k != "block_tokens"})
    runner, _ = runner_of(loaded, tmp_path, grid)
    runner.run()
    sizes = {row["policy"]: row["settings"]["memory"]["block_tokens"] for row in runner.rows}
    assert sizes == {"infllm, block 8": 8, "infllm, block 16": 16}
    assert len({row["cell"] for row in runner.rows}) == 4
    assert "infllm, block 16" in as_text(grid_table(runner.rows))
    assert "blocks of 8 to 16;" in sheet_of(runner.rows).caption
    (panel,) = sheet_of(runner.rows).panels
    assert (list(panel.columns), panel.column_name) == (["8", "16"], "block")
    assert len(panel.shares) == 2 and all(
        share is not None for row in panel.shares for share in row
    )


def test_the_command_takes_it(server, tmp_path):
    done = server.run(["eval", "passkey", "--vary", "colour=1", "--lengths", "2k"])
    assert done.returncode == UsageError.exit_code and b"--vary: 'colour'" in done.stderr
