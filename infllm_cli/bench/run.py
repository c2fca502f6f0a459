"""`infllm bench`: load the model twice, measure, print."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from infllm_cli.bench import text as texts
from infllm_cli.bench.measure import Bench, Plan, Point
from infllm_cli.bench.picture import svg_file
from infllm_cli.bench.report import as_json, parts_table, table
from infllm_cli.document import Document, decode_document
from infllm_cli.errors import CapacityError, UsageError
from infllm_cli.evaluate.tables import as_text
from infllm_cli.models.loading import load_plain
from infllm_cli.reader import Reader
from infllm_cli.tokens import Tokens
from infllm_cli.told import dtype_name, peak_process_bytes
from infllm_cli.wording import size

if TYPE_CHECKING:
    from infllm_cli.console import Console

CHARS_PER_TOKEN = 5  # more than text has: what is left over is cut off


@dataclass(frozen=True)
class BenchRequest:
    """What the user asked for, as the command line gives it."""

    lengths: tuple[int, ...]
    limit_seconds: float
    steps: int
    candidates: int
    profile: bool
    model: str | None
    device: str
    dtype: str
    cache_dir: Path | None
    sizes: dict[str, Any]
    document: Document | None = None
    picture: Path | None = None
    as_json: bool = False


def parse_lengths(given: str) -> tuple[int, ...]:
    """Token counts out of a list such as "2k,8k" or "4096,32768", rising.

    Raises:
        UsageError: what is no such list.
    """
    found = []
    for word in given.split(","):
        plain = word.strip().lower()
        number = plain.removesuffix("k")
        if not number.isdigit() or int(number) == 0:
            raise UsageError(f"--lengths {given!r}: {word!r} is no length; give some as in 2k,8k.")
        found.append(int(number) * (1024 if plain.endswith("k") else 1))
    return tuple(sorted(set(found)))


def check(request: BenchRequest, config_tokens: int) -> None:
    """Refuse lengths at which there would be nothing to look up.

    Raises:
        UsageError: naming the least length.
    """
    if request.lengths[0] < config_tokens:
        raise UsageError(
            f"--lengths {request.lengths[0]}: below {config_tokens:,} tokens (sinks, window, block "
            "and chunk) there is no memory to measure."
        )


def run_bench(request: BenchRequest, console: Console, out: TextIO) -> None:
    """Measure, and print tables or with `--json` everything.

    Raises:
        InfllmError: see the modules.
    """
    picture = request.picture
    if picture is not None and not picture.parent.is_dir():
        raise UsageError(f"--picture {picture}: there is no folder {picture.parent}.")
    console.stage("loading the model")
    reader = Reader.load(
        request.model,
        device=request.device,
        dtype=request.dtype,
        cache_dir=request.cache_dir,
        progress=console.fetching,
        **request.sizes,
    )
    sizes = reader.config
    least = sizes.sink_tokens + sizes.window_tokens + sizes.block_tokens + sizes.chunk_tokens
    check(request, least)
    plain = load_plain(reader.loaded)
    console.stage("tokenizing")
    document, tokens = text_of(reader, request.document, request.lengths[-1])
    plan = Plan(
        request.lengths,
        request.limit_seconds,
        request.steps,
        request.candidates,
        request.profile,
    )
    bench = Bench(reader, plain, plan, console.stage)
    points: list[Point] = []
    for point in bench.run(document, tokens):
        points.append(point)
        share = point.bare_chunk / point.recent_chunk
        console.note(
            f"{point.tokens:,} tokens: reading at {share:.2f} of the bare model, an answer token "
            f"takes {point.step / point.bare_step:.2f} bare ones"
        )
    assert bench.rates is not None
    facts = {
        "model": reader.loaded.name,
        "dtype": dtype_name(reader.loaded.dtype),
        "device": str(reader.loaded.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "config": sizes.as_dict(),
        "text": document.name,
        "process_bytes_peak": peak_process_bytes(),
    }
    if request.as_json:
        told = as_json(points, bench.rates, facts, sizes.chunk_tokens)
        out.write(json.dumps(told) + "\n")
    else:
        out.write(
            f"{facts['model']}, {facts['dtype']} on {facts['device']}, {facts['threads']} threads; "
            f"matrix product {bench.rates.product / 1e9:,.0f} GFLOP/s, copy "
            f"{bench.rates.moved / 1e9:.1f} GB/s; process {size(facts['process_bytes_peak'])}\n\n"
        )
        out.write(as_text(table(points, sizes.chunk_tokens, bench.rates)))
        for kind in points[0].parts:
            out.write("\n" + as_text(parts_table(points, kind)))
    if picture is not None:
        try:
            drawn = svg_file(points, sizes.chunk_tokens, reader.loaded.name)
            picture.write_text(drawn, encoding="utf-8")
        except OSError as error:
            raise CapacityError(f"{picture}: {error.strerror or error}.") from None
    out.flush()


def text_of(reader: Reader, given: Document | None, tokens: int) -> tuple[Document, Tokens]:
    """A document of exactly so many tokens: the given one, repeated if it is shorter, or a made-up
    one.
    """
    chars = tokens * CHARS_PER_TOKEN
    while True:
        if given is None:
            name, text = "made-up text", texts.made_text(chars)
        else:
            name, text = given.name, texts.repeated(given.text, chars)
        found = reader.prompt.tokenizer.encode(text)
        if len(found) >= tokens:
            break
        chars *= 2
    found = found[slice(0, tokens)]
    text = text[: int(found.spans[-1, 1])]
    return decode_document(text.encode(), name, "utf-8"), found
