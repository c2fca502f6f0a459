"""Speed over length as a picture: a single SVG file, for light and dark ground."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from infllm_cli.bench.measure import Point
from infllm_cli.bench.report import shortened

WIDE, TALL, LEFT, TOP, GAP = 380, 220, 70, 56, 90
FULL = LEFT + 2 * WIDE + GAP + 180
STYLE = """
.bench{color:#1f2328;background:#fff;font:12px/1.3 system-ui,sans-serif}
.bench text{fill:currentColor}.bench .dim{opacity:.7}
.bench path.grid{stroke:currentColor;opacity:.15}
.bench path{fill:none;stroke-width:2}.bench circle{stroke:none}
.bench path.ours{stroke:#c2410c}.bench circle.ours{fill:#c2410c}
.bench path.bare{stroke:#57606a;stroke-dasharray:5 4}.bench circle.bare{fill:#57606a}
.bench path.dense{stroke:#0969da}.bench circle.dense{fill:#0969da}
@media(prefers-color-scheme:dark){.bench{color:#e6e6e6;background:#16181d}
.bench path.ours{stroke:#ffb86b}.bench circle.ours{fill:#ffb86b}
.bench path.bare{stroke:#9aa4b2}.bench circle.bare{fill:#9aa4b2}
.bench path.dense{stroke:#79c0ff}.bench circle.dense{fill:#79c0ff}}
"""
Curve = list[tuple[int, float]]  # tokens, value


def svg_file(points: Sequence[Point], chunk_tokens: int, model: str) -> str:
    """Two charts beside each other: tokens per second while reading, and ms per answer token."""
    reading: dict[str, Curve] = {
        "bare": [(p.tokens, chunk_tokens / p.bare_chunk) for p in points],
        "ours": [(p.tokens, chunk_tokens / p.recent_chunk) for p in points],
        "dense": [(p.tokens, chunk_tokens / p.dense_chunk) for p in points if p.dense_chunk],
    }
    answering: dict[str, Curve] = {
        "bare": [(p.tokens, 1000 * p.bare_step) for p in points],
        "ours": [(p.tokens, 1000 * p.step) for p in points],
        "dense": [(p.tokens, 1000 * p.dense_step) for p in points if p.dense_step],
    }
    told = "; ".join(
        f"at {shortened(p.tokens)} tokens {chunk_tokens / p.recent_chunk:.0f} tokens/s read "
        f"(bare model {chunk_tokens / p.bare_chunk:.0f}), {1000 * p.step:.0f} ms per answer token "
        f"(bare model {1000 * p.bare_step:.0f})"
        for p in points
    )
    tall = TOP + TALL + 60
    body = _chart(LEFT, "Reading, tokens per second", reading) + _chart(
        LEFT + WIDE + GAP, "Answer token, milliseconds", answering
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" class="bench" role="img" '
        f'aria-labelledby="name told" width="{FULL}" height="{tall}" '
        f'viewBox="0 0 {FULL} {tall}">'
        f'<title id="name">Speed of {escape(model)} over the length of the document</title>'
        f'<desc id="told">{escape(told)}</desc><style>{STYLE}</style>{body}{_legend()}</svg>\n'
    )


def _chart(left: int, title: str, curves: dict[str, Curve]) -> str:
    lengths = sorted({tokens for curve in curves.values() for tokens, _ in curve})
    top = _nice(max(value for curve in curves.values() for _, value in curve))
    low, high = math.log2(lengths[0]), math.log2(lengths[-1])

    def x(tokens: int) -> float:
        share = (math.log2(tokens) - low) / (high - low) if high > low else 0.5
        return left + WIDE * share

    def y(value: float) -> float:
        return TOP + TALL * (1 - value / top)

    parts = [f'<text x="{left}" y="{TOP - 24}" font-weight="600">{escape(title)}</text>']
    for number in range(5):
        value = top * number / 4
        at = y(value)
        parts.append(f'<path class="grid" d="M{left} {at:.1f}h{WIDE}"/>')
        parts.append(
            f'<text class="dim" x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    for tokens in lengths:
        parts.append(
            f'<text class="dim" x="{x(tokens):.1f}" y="{TOP + TALL + 20}" '
            f'text-anchor="middle">{shortened(tokens)}</text>'
        )
    parts.append(
        f'<text class="dim" x="{left + WIDE / 2}" y="{TOP + TALL + 42}" text-anchor="middle">'
        "tokens read</text>"
    )
    for name, curve in curves.items():
        if not curve:
            continue
        line = " ".join(f"{x(tokens):.1f},{y(value):.1f}" for tokens, value in curve)
        parts.append(f'<path class="{name}" d="M{line}"/>')
        for tokens, value in curve:
            parts.append(
                f'<circle class="{name}" cx="{x(tokens):.1f}" cy="{y(value):.1f}" r="3.5">'
                f"<title>{shortened(tokens)}: {value:,.1f}</title></circle>"
            )
    return "".join(parts)


def _legend() -> str:
    left = LEFT + 2 * WIDE + GAP + 24
    parts = []
    for number, (kind, label) in enumerate(
        (("ours", "infllm"), ("bare", "bare model"), ("dense", "dense cache"))
    ):
        at = TOP + 8 + 22 * number
        parts.append(f'<path class="{kind}" d="M{left} {at}h24"/>')
        parts.append(f'<text x="{left + 32}" y="{at + 4}">{label}</text>')
    return "".join(parts)


def _nice(value: float) -> float:
    """The next of 1, 2, 4, 6, 8 times a power of ten, so that quarters are round."""
    unit = 10 ** math.floor(math.log10(max(value, 1e-9)))
    return next(unit * step for step in (1, 2, 4, 6, 8, 10) if unit * step >= value)
