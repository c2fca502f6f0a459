"""Flags of policies and of the method's knobs, and the texts of their help. Imports no torch."""

from __future__ import annotations

from typing import Annotated

import typer

from infllm_cli.memory.knobs import (
    CachePolicy,
    InfiniGates,
    InfiniUpdate,
    Lookup,
    Policy,
    Positions,
    Relevance,
    RepresentativeRule,
    Sharing,
)

METHOD = "Advanced: policies and knobs of the method"

PolicyOption = Annotated[
    Policy | None,
    typer.Option(
        "--policy",
        envvar="INFLLM_POLICY",
        help="What is kept of the document, and what of it is attended.",
        show_default="infllm",
        rich_help_panel=METHOD,
    ),
]
Block = Annotated[
    int | None,
    typer.Option(
        envvar="INFLLM_BLOCK",
        min=32,
        max=256,
        help="Tokens of a block.",
        show_default="128",
        rich_help_panel=METHOD,
    ),
]
Representatives = Annotated[
    int | None,
    typer.Option(
        envvar="INFLLM_REPRESENTATIVES",
        min=1,
        max=16,
        help="Keys that stand for a block.",
        show_default="4",
        rich_help_panel=METHOD,
    ),
]
RepresentativeRuleOption = Annotated[
    RepresentativeRule | None,
    typer.Option(
        "--representative-rule",
        envvar="INFLLM_REPRESENTATIVE_RULE",
        help="Which: those that the following tokens look at most, by products or by attention "
        "mass; the mean of all; those that cover the block; every so many-th.",
        show_default="dot; of infllm-paper attention",
        rich_help_panel=METHOD,
    ),
]
RelevanceOption = Annotated[
    Relevance | None,
    typer.Option(
        "--relevance",
        envvar="INFLLM_RELEVANCE",
        help="What blocks are ranked by: the sum or the best of products, or attention mass.",
        show_default="auto: sum for representatives, mass for exact lookup",
        rich_help_panel=METHOD,
    ),
]
SharingOption = Annotated[
    Sharing | None,
    typer.Option(
        "--sharing",
        envvar="INFLLM_SHARING",
        help="Who loads the same blocks.",
        show_default="kv-head; of infllm-paper layer",
        rich_help_panel=METHOD,
    ),
]
PositionsOption = Annotated[
    Positions | None,
    typer.Option(
        "--positions",
        envvar="INFLLM_POSITIONS",
        help="Where sinks and blocks stand: before the window, or all one window away.",
        show_default="consecutive; of infllm-paper same-distance",
        rich_help_panel=METHOD,
    ),
]
ReadLookup = Annotated[
    Lookup | None,
    typer.Option(
        envvar="INFLLM_READ_LOOKUP",
        help="How blocks are found while reading.",
        show_default="representatives",
        rich_help_panel=METHOD,
    ),
]
AnswerLookup = Annotated[
    Lookup | None,
    typer.Option(
        envvar="INFLLM_ANSWER_LOOKUP",
        help="The same while asking and answering.",
        show_default="exact; of infllm-paper representatives",
        rich_help_panel=METHOD,
    ),
]
DeviceCacheOption = Annotated[
    int | None,
    typer.Option(
        "--device-cache",
        envvar="INFLLM_DEVICE_CACHE",
        metavar="BLOCKS",
        help="Blocks per KV head and layer that stay on the device between steps.",
        show_default="0: none",
        rich_help_panel=METHOD,
    ),
]
CachePolicyOption = Annotated[
    CachePolicy | None,
    typer.Option(
        "--device-cache-policy",
        envvar="INFLLM_DEVICE_CACHE_POLICY",
        help="Which of them leaves first.",
        show_default="lru",
        rich_help_panel=METHOD,
    ),
]
InfiniSegment = Annotated[
    int | None,
    typer.Option(
        envvar="INFLLM_INFINI_SEGMENT",
        help="Tokens of a segment of infini.",
        show_default="2048, or half the trained length",
        rich_help_panel=METHOD,
    ),
]
InfiniUpdateOption = Annotated[
    InfiniUpdate | None,
    typer.Option(
        "--infini-update",
        envvar="INFLLM_INFINI_UPDATE",
        help="How infini writes a segment into its memory.",
        show_default="delta",
        rich_help_panel=METHOD,
    ),
]
InfiniGatesOption = Annotated[
    InfiniGates | None,
    typer.Option(
        "--infini-gates",
        envvar="INFLLM_INFINI_GATES",
        help="How much heads listen to that memory: see `infllm fit-gates`.",
        show_default="fitted; off where nothing has been fitted",
        rich_help_panel=METHOD,
    ),
]
