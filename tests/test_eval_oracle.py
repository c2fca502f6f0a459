"""What the oracle says of lookups, against attention written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_eval_grid import OPTIONS, SIZES, Counting, grid_of
from tiny_readers import SMALL, make_reader, read_text
from tiny_tokenizers import prose

from infllm_cli.errors import UsageError
from infllm_cli.evaluate.grid import Deadline
from infllm_cli.evaluate.oracle import Observer, OracleRunner, Way, blocks_of
from infllm_cli.evaluate.results import Results
from infllm_cli.evaluate.tasks import kv
from infllm_cli.evaluate.tasks.base import Probe, evenly
from infllm_cli.limits import Limits
from infllm_cli.memory.knobs import Lookup, Policy, Relevance
from infllm_cli.voices import Voice


def observed(answer: list[int], **sizes: Any) -> tuple[dict[tuple[str, int], Any], list]:
    """What an observer of one step captured, by way and number; layers, queries, stored keys."""
    reader = make_reader(config=replace(SMALL, **sizes))
    memory = read_text(reader, prose(3000))
    observer, queries = Observer(answer), []

    def watch(layer: Any, q: Any, step: Any) -> None:
        queries.append((layer, q.clone(), layer.arena.count))
        observer(layer, q, step)

    with memory.state.question():
        memory.state.observer = watch
        Voice(reader, memory.state).ask(reader.prompt.question_ids("Where is the whale?"))
        memory.state.observer = None
        stored = [
            layer.arena.stretch(0, n * layer.arena.block_tokens)[0] for layer, _, n in queries
        ]
    told = {(c.way, c.blocks): c for c in observer.captured()}
    pairs = zip(queries, stored, strict=True)
    return told, [(layer, q, keys) for (layer, q, _), keys in pairs]


def test_shares_are_those_of_a_softmax_over_all_stored_keys() -> None:
    told, seen = observed([3])
    assert len(seen) == 4  # layers
    for layer, q, keys in seen:
        g, size = layer.geometry, layer.config.block_tokens
        far = g.rotary.table(layer.config.window_tokens, 1)
        heads = g.rotary.rotate(q, far).unflatten(0, (g.kv_heads, -1))
        weights = torch.softmax(
            torch.einsum("hgld,hnd->hgln", heads.float(), keys.float()) * g.scaling, dim=-1
        )
        mass = weights.unflatten(-1, (-1, size)).sum(dim=-1).sum(dim=(1, 2))  # [H_kv, N]
        mass /= mass.sum(dim=1, keepdim=True)
        for blocks in (1, 2, 4, 8):
            best = mass.topk(blocks, dim=1).values.sum(dim=1).mean()
            latest = mass[:, -blocks:].sum(dim=1).mean()
            joint = mass.sum(dim=0).topk(blocks).indices
            assert told["exact", blocks].shares[g.index] == pytest.approx(float(best), abs=1e-4)
            assert told["latest", blocks].shares[g.index] == pytest.approx(float(latest), abs=1e-4)
            shared = mass[:, joint].sum(dim=1).mean()
            assert told["exact, shared", blocks].shares[g.index] == pytest.approx(
                float(shared), abs=1e-4
            )
        found = (mass.topk(2, dim=1).indices == 3).any(dim=1).float().mean()
        assert told["exact", 2].found[g.index] == pytest.approx(float(found), abs=1e-4)


@pytest.mark.parametrize("relevance", Relevance)
def test_nothing_captures_more_than_the_exact_lookup(relevance: Relevance) -> None:
    told, _ = observed([], relevance=relevance)
    for (_, blocks), captured in told.items():
        assert captured.shares.keys() == {0, 1, 2, 3} and captured.found == {}
        for layer, share in captured.shares.items():
            assert 0 < share <= told[Way.EXACT.value, blocks].shares[layer] + 1e-6


def test_representatives_are_those_that_the_memory_itself_would_load() -> None:
    config = replace(SMALL, answer_lookup=Lookup.REPRESENTATIVES, answer_blocks=4)
    reader = make_reader(config=config)
    memory = read_text(reader, prose(3000))
    with memory.state.question():
        observer = Observer([2])
        memory.state.observer = observer
        step = Voice(reader, memory.state).ask(reader.prompt.question_ids("Where?"))[-1]
    captured = next(
        c for c in observer.captured() if c.way == Way.REPRESENTATIVES.value and c.blocks == 4
    )
    for layer, blocks in step.loaded.items():
        assert captured.found[layer] == pytest.approx(
            float((blocks == 2).any(dim=1).float().mean())
        )


def test_the_blocks_of_an_answer_are_found_by_its_characters() -> None:
    reader = make_reader()
    text = prose(3000)
    memory = read_text(reader, text)
    at = text.index(" ", 1500)
    (block,) = blocks_of(memory, Probe("?", ("x",), spans=((at + 1, at + 4),)))
    token = next(i for i, (_, end) in enumerate(memory.tokens.spans) if end > at + 1)
    position = memory.first_position + token
    assert block == (position - memory.state.config.sink_tokens) // 16
    assert blocks_of(memory, Probe("?", ("x",))) == set()


def test_the_oracle_runs_over_a_grid_and_goes_on(tmp_path: Path) -> None:
    loaded = make_reader().loaded
    file = tmp_path / "oracle.jsonl"
    policies = [Policy.INFLLM, Policy.INFLLM_PAPER]
    grid = grid_of(tasks=[kv.kv()], depths=evenly(2), policies=policies, lengths=[900])

    def run() -> OracleRunner:
        arguments = (Results(file), Counting(), tmp_path, Limits.usual(), Deadline(None))
        runner = OracleRunner(grid, loaded, *arguments)
        runner.run()
        return runner

    first = run()
    assert len(first.rows) == 4 and all(row["answer_blocks"] for row in first.rows)
    phases = {(c["phase"], c["way"]) for row in first.rows for c in row["captured"]}
    assert phases == {(phase, way.value) for phase in ("ask", "answer") for way in Way}
    again = run()
    assert again.found == 4 and again.rows == first.rows


def test_the_oracle_refuses_what_looks_nothing_up(tmp_path: Path) -> None:
    loaded = make_reader().loaded
    grid = grid_of(policies=[Policy.DENSE], options=OPTIONS, sizes=SIZES)
    with pytest.raises(UsageError, match=r"--policies dense.*infllm, infllm-paper"):
        OracleRunner(
            grid, loaded, Results(None), Counting(), tmp_path, Limits.usual(), Deadline(None)
        )
