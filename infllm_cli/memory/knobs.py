"""The choices of the method that a memory can be built with, by the field's names."""

from __future__ import annotations

import enum


class Policy(enum.Enum):
    """What a layer keeps of its past, and what a step attends of it."""

    INFLLM = "infllm"  # all blocks in host memory, exact lookup while answering
    INFLLM_PAPER = "infllm-paper"  # InfLLM as published, arXiv 2402.04617
    DENSE = "dense"  # everything, everything
    STREAMING_LLM = "streaming-llm"  # sinks and window, consecutive positions; arXiv 2309.17453
    LM_INFINITE = "lm-infinite"  # sinks and window, distances capped; arXiv 2308.16137
    H2O = "h2o"  # sinks, window and heavy hitters, a fixed budget; arXiv 2306.14048
    INFINI = "infini"  # segments and a compressive memory; arXiv 2404.07143

    @property
    def has_blocks(self) -> bool:
        """Whether layers keep their past in blocks, which can be looked up and saved."""
        return self in (Policy.INFLLM, Policy.INFLLM_PAPER)


class Lookup(enum.Enum):
    """How a step finds the blocks that join its attention."""

    REPRESENTATIVES = "representatives"  # a few keys stand for their block: cheap, approximate
    EXACT = "exact"  # every stored key is scored


class RepresentativeRule(enum.Enum):
    """Which keys stand for a block."""

    DOT = "dot"  # the tokens that the following ones look at most, by q . k (the paper)
    ATTENTION = "attention"  # the same by attention mass (the paper's reference code)
    MEAN = "mean"  # one vector, the mean of the block's keys
    EXEMPLAR = "exemplar"  # tokens that cover the block's keys: the farthest from those chosen
    STRIDE = "stride"  # every so many-th token, whatever it says


class Relevance(enum.Enum):
    """What makes a block relevant to the queries of a step."""

    AUTO = "auto"  # sum for representatives (the paper), mass for exact lookup
    SUM = "sum"  # q . k, summed over queries and keys
    MAX = "max"  # each query's best q . k, summed over queries
    MASS = "mass"  # each query's softmax over all keys scored, summed over queries


class Sharing(enum.Enum):
    """Who loads the same blocks."""

    PER_KV_HEAD = "kv-head"
    PER_LAYER = "layer"


class Positions(enum.Enum):
    """Where sinks and loaded blocks stand."""

    CONSECUTIVE = "consecutive"  # directly before the window, as in StreamingLLM
    SAME_DISTANCE = "same-distance"  # all of them one window away from every query (the paper)


class CachePolicy(enum.Enum):
    """Which block leaves the device cache when another one needs its slot."""

    LRU = "lru"  # the one not used for longest
    LRU_S = "lru-s"  # the lowest score: s = 0.1 s + attention mass at every step (the paper)
    FIFO = "fifo"  # the one that came first
    RANDOM = "random"


class InfiniGates(enum.Enum):
    """How much each head listens to the memory of Infini-attention."""

    FITTED = "fitted"  # as `infllm fit-gates` found for the model; off where it has not been run
    OFF = "off"  # not at all: segments know nothing of each other
    HALF = "half"  # as much as to its segment, sigmoid(0): gates before any fitting


class InfiniUpdate(enum.Enum):
    """How Infini-attention writes a segment into its memory."""

    LINEAR = "linear"
    DELTA = "delta"  # only what the memory does not tell yet
