"""What a model of which size is shown beside the memory; by its number of parameters.

Figures: questions answered in a model's own words, of 135M (the default) and of 500M.
"""

from __future__ import annotations

# Models below this misremember what they have just read: the sentence is quoted, and asked alone
# even where the whole document is attended. Of 24 questions on halves of the sample story the
# default model then answers 11 instead of 1.
QUOTED_BELOW = 1_000_000_000
# Below this what stands around the best sentence is more use to them than whole passages. Of
# 72 questions on a story and two novels the smaller answers 17 from the sentence alone and 15 from
# four passages, the larger 28 and 35. Beside a document that is attended whole the sentence
# helps both: of 24 on the story the larger then answers 20, and beside the passages 17.
SENTENCE_BELOW = 300_000_000
# Tokens of passages that are read again. The larger reads them once, alone, instead of there and
# behind the document, so twice as many take as long. With 480, 960, 1440 and 2880 tokens passages
# alone answer 15, 16, 14 and 14 of 32 on a novel, and hold the answer for 16, 21, 23 and 24.
REREAD_TOKENS, REREAD_BY_LARGER = 480, 960
# Logarithm of the memory's part before the first token, where passages have one of 0 beside it. Of
# the same 32 both answer 11 with 0 (passages behind the document, too), 13 with -2, 9 and 13
# without those behind it, and 15 with -2 and 960 tokens.
MEMORY_BESIDE_PASSAGES = -2.0


def reread_tokens(wanted: int | None, parameters: int) -> int:
    """Most tokens of passages that are read again; `wanted`: by the user, if at all."""
    if wanted is not None:
        return wanted
    return REREAD_TOKENS if parameters < SENTENCE_BELOW else REREAD_BY_LARGER
