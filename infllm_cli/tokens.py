"""Text to token ids with character spans, in bounded pieces.

A document is text and nothing else: whatever it spells, no control token comes out of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from tokenizers import Tokenizer, models

from infllm_cli.errors import ModelError

PIECE_CHARS = 32_768  # characters tokenized at once: keeps time linear and memory flat
OVERLAP_CHARS = 1_024  # characters tokenized twice, where two pieces are stitched

_SPACE_MARK = "\u2581"  # how sentencepiece vocabularies write a space


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens of a text, or of a piece of one.

    Attributes:
        ids: ``[n]`` int32.
        spans: ``[n, 2]`` int64, first character and the one after the last, counted from the
            beginning of the whole text. Starts and ends never decrease, and together the spans
            cover the text without a gap. Tokens that share a character (bytes of one emoji, a
            marker that the tokenizer puts before a word) overlap on it; all others only touch.
    """

    ids: np.ndarray
    spans: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Tokens:
        return Tokens(self.ids[part], self.spans[part])


class PlainTokenizer:
    """Tokenizes text as plain text: no control token ever comes out of it.

    Control tokens are the backend's added tokens, special or not, and ``control_ids``. Two kinds
    are exempt because ordinary text needs them: runs of white space that some vocabularies add,
    and the unknown token where it stands for a character outside the vocabulary. The backend
    itself is left as it is; its model is shared, not copied.

    Args:
        backend: What a fast tokenizer of transformers holds as ``backend_tokenizer``.
        control_ids: Further ids that text must not produce.
        piece_chars: Characters tokenized at once, at least 16.
    """

    def __init__(
        self,
        backend: Tokenizer,
        control_ids: Iterable[int] = (),
        *,
        piece_chars: int = PIECE_CHARS,
    ):
        if piece_chars < 16:
            raise ValueError(f"piece_chars is {piece_chars}, must be at least 16")
        self._piece_chars = piece_chars
        self._overlap_chars = min(OVERLAP_CHARS, piece_chars // 4)

        added = backend.get_added_tokens_decoder()
        control = {id: token.content for id, token in added.items()}
        control |= {id: backend.id_to_token(id) or "" for id in control_ids}
        spaces = {id: added[id] for id in added if _is_space(added[id].content)}
        control = {id: content for id, content in control.items() if not _is_space(content)}
        unknown, by_name = _by_name_only(backend)
        for id in by_name:
            control.pop(id, None)

        self._unknown = unknown
        self._by_name = by_name
        self._is_control = _mask(control, backend)
        self._is_by_name = _mask(by_name, backend)
        self._first = _bare(backend.model, backend.pre_tokenizer, backend.normalizer)
        self._rest = self._first
        if spaces:
            # An added token that the model does not know gets a new id in the copy.
            for token in spaces.values():
                token.special = False
                self._first.add_tokens([token])
            copied = {self._first.token_to_id(token.content): id for id, token in spaces.items()}
            self._ids = np.arange(max(len(self._is_control), *copied) + 1, dtype=np.int32)
            self._ids[list(copied)] = list(copied.values())
        else:
            self._ids = None
            # Where added tokens cut the text, each section gets its prefix, so the copy without
            # one would differ; without them, only the very beginning has it.
            self._rest = _without_prefix(backend) or self._first

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids that never come out of `encode`."""
        return frozenset(np.flatnonzero(self._is_control).tolist())

    def encode(self, text: str) -> Tokens:
        """Tokenize a whole text in bounded pieces.

        On ordinary prose the ids are those of tokenizing it at once. No token is added at either
        end. A text that the tokenizer drops altogether has no tokens.

        Raises:
            ModelError: The vocabulary can write some character only as a control token.
        """
        return _join(self.iter_encode(text))

    def iter_encode(self, text: str) -> Iterator[Tokens]:
        """Yield the tokens of `encode` piece by piece, none empty; memory stays flat.

        Raises:
            ModelError: As in `encode`.
        """
        end = min(self._piece_chars, len(text))
        piece = self._encode_piece(text, 0, end)
        while end < len(text):
            start = self._restart(piece, end)
            end = min(start + self._piece_chars, len(text))
            following = self._encode_piece(text, start, end)
            if not len(following):  # the normalizer drops it all
                if len(piece):
                    piece.spans[-1, 1] = end
                continue
            if not len(piece):
                following.spans[0, 0] = 0
                piece = following
                continue
            i, j = _stitch(piece, following)
            if i:
                yield piece[:i]
            piece = following[j:]
        if len(piece):
            yield piece

    def _restart(self, piece: Tokens, end: int) -> int:
        """Return where the next piece begins: a token border shortly before this one's end.

        A border, so that text without any natural place to stitch still has a common one: the
        beginning of the next piece itself.
        """
        borders = piece.spans[_clean_borders(piece.spans), 0]
        at = np.searchsorted(borders, max(end - self._overlap_chars, 1))
        return int(borders[at]) if at < len(borders) else end

    def _encode_piece(
        self, text: str, start: int, end: int, backend: Tokenizer | None = None
    ) -> Tokens:
        """Tokenize ``text[start:end]``; spans count from the beginning of ``text``."""
        backend = backend or (self._rest if start else self._first)
        encoding = backend.encode(text[start:end], add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        if not len(ids):
            return _join(())
        spans = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(ids))
        spans = spans.reshape(-1, 2) + start
        if self._ids is not None:
            ids = self._ids[ids]
        _tile(spans, start, end)
        bad = self._is_control[ids]
        for i in np.flatnonzero(self._is_by_name[ids]):
            bad[i] = text[spans[i, 0] : spans[i, 1]].strip() == self._by_name[int(ids[i])]
        tokens = Tokens(ids, spans)
        if bad.any():
            tokens = self._spell_out(text, tokens, np.flatnonzero(bad))
            _tile(tokens.spans, start, end)
        assert not self._is_control[tokens.ids].any()
        return tokens

    def _spell_out(self, text: str, tokens: Tokens, bad: np.ndarray) -> Tokens:
        """Replace the control tokens at the indexes ``bad`` by tokens of their text.

        The text is cut after its first character. Some vocabularies hold control strings as
        ordinary entries; cut in two, none can match.
        """
        parts, done = [], 0
        spelled: dict[str, Tokens] = {}  # documents that hold one marker tend to hold many
        for i in bad.tolist():
            begin, stop = tokens.spans[i].tolist()
            marker = text[begin:stop]
            if marker not in spelled:
                spelled[marker] = self._spell(marker)
            parts += [
                tokens[done:i],
                Tokens(spelled[marker].ids, spelled[marker].spans + begin),
            ]
            done = i + 1
        return _join([*parts, tokens[done:]])

    def _spell(self, marker: str) -> Tokens:
        """Return tokens for a string that encodes to a control token."""
        if len(marker) < 2:
            ids = np.array([self._stand_in(marker)], np.int32)
            return Tokens(ids, np.array([[0, len(marker)]], np.int64))
        # The copy without a prefix: these are no beginnings of texts.
        cuts = ((0, 1), (1, len(marker)))
        return _join(self._encode_piece(marker, *cut, self._rest) for cut in cuts)

    def _stand_in(self, character: str) -> int:
        if self._unknown is None:
            raise ModelError(
                f"the tokenizer can write {character!r} only as a control token, "
                "so documents that hold it cannot be read as plain text; choose another model"
            )
        return self._unknown


def _join(parts: Iterable[Tokens]) -> Tokens:
    """Return the tokens of all parts; of none, no tokens."""
    parts = [Tokens(np.zeros(0, np.int32), np.zeros((0, 2), np.int64)), *parts]
    return Tokens(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.spans for part in parts]),
    )


# --- spans -----------------------------------------------------------------------------------


def _tile(spans: np.ndarray, start: int, end: int) -> None:
    """Make spans monotone and cover [start, end) without a gap, in place."""
    starts, ends = spans[:, 0], spans[:, 1]
    np.clip(spans, start, end, out=spans)
    np.maximum.accumulate(starts, out=starts)
    starts[0] = start
    np.maximum(ends, starts, out=ends)
    np.maximum(ends[:-1], starts[1:], out=ends[:-1])
    ends[-1] = end
    np.maximum.accumulate(ends, out=ends)


def _clean_borders(spans: np.ndarray) -> np.ndarray:
    """Return the indexes, ascending, of tokens that share no character with the one before."""
    return np.flatnonzero(spans[1:, 0] >= spans[:-1, 1]) + 1


def _stitch(left: Tokens, right: Tokens) -> tuple[int, int]:
    """Return how many tokens of ``left`` to keep and how many of ``right`` to drop.

    Both have a token border at that character. It lies in the middle of the longest run of
    tokens in which the two agree, far from either cut; where they never agree, it is the
    beginning of ``right``.
    """
    first = int(np.searchsorted(left.spans[:, 0], right.spans[0, 0]))
    ours = {int(left.spans[i, 0]): int(i) for i in _clean_borders(left.spans[first:]) + first}
    begin = int(right.spans[0, 0])
    if first == len(left) or left.spans[first - 1, 1] <= begin:
        ours[begin] = first
    last = int(left.spans[-1, 1])
    ours[last] = len(left)
    theirs = {begin: 0}
    for j in _clean_borders(right.spans):
        theirs[int(right.spans[j, 0])] = int(j)
        if right.spans[j, 0] >= last:
            break
    common = sorted(ours.keys() & theirs.keys())
    best_low, best_high, low = 0, 0, 0
    for k in range(1, len(common)):
        i, i_next = ours[common[k - 1]], ours[common[k]]
        j, j_next = theirs[common[k - 1]], theirs[common[k]]
        if not np.array_equal(left.ids[i:i_next], right.ids[j:j_next]):
            low = k
        elif k - low > best_high - best_low:
            best_low, best_high = low, k
    cut = common[(best_low + best_high) // 2]
    return ours[cut], theirs[cut]


# --- copies of the backend -------------------------------------------------------------------


def _is_space(content: str) -> bool:
    return bool(content) and not content.replace(_SPACE_MARK, " ").strip()


def _mask(ids: Iterable[int], backend: Tokenizer) -> np.ndarray:
    """Return a bool for each id of the vocabulary, true for ``ids``."""
    ids = list(ids)
    mask = np.zeros(max([backend.get_vocab_size(with_added_tokens=True) - 1, *ids]) + 1, bool)
    mask[ids] = True
    return mask


def _by_name_only(backend: Tokenizer) -> tuple[int | None, dict[int, str]]:
    """Return the unknown token, and the ids that only their own name in a text makes a forgery.

    Those are the unknown token and the bytes (``<0x0A>``) of a vocabulary with byte fallback.
    """
    model = backend.model
    if isinstance(model, models.Unigram):  # tells its settings only as JSON
        settings = json.loads(Tokenizer(model).to_str())["model"]
        unknown = settings.get("unk_id")
        has_bytes = settings.get("byte_fallback", False)
    else:
        name = getattr(model, "unk_token", None)
        unknown = model.token_to_id(name) if name else None
        has_bytes = getattr(model, "byte_fallback", False)
    by_name = {}
    if unknown is not None:
        by_name[unknown] = model.id_to_token(unknown)
    if has_bytes:
        names = (f"<0x{byte:02X}>" for byte in range(256))
        by_name |= {id: name for name in names if (id := model.token_to_id(name)) is not None}
    return unknown, by_name


def _bare(model, pre_tokenizer, normalizer) -> Tokenizer:
    """Return a tokenizer with this model that neither matches nor adds control tokens."""
    copy = Tokenizer(model)
    if normalizer is not None:
        copy.normalizer = normalizer
    if pre_tokenizer is not None:
        copy.pre_tokenizer = pre_tokenizer
    return copy


def _without_prefix(backend: Tokenizer) -> Tokenizer | None:
    """Return a copy that puts no space before the text, or None where the backend puts none."""
    shell = _bare(models.BPE(), backend.pre_tokenizer, backend.normalizer)
    before = shell.to_str()
    settings = json.loads(before)
    splitter = settings["pre_tokenizer"] or {}
    # Inside a sequence the prefix may belong to every word, so only a lone one is changed.
    if splitter.get("type") == "ByteLevel":
        splitter["add_prefix_space"] = False
    elif splitter.get("type") == "Metaspace" and splitter.get("prepend_scheme") != "never":
        splitter["prepend_scheme"] = "never"
    normalizer = settings["normalizer"] or {}
    if normalizer.get("type") == "Prepend":
        settings["normalizer"] = None
    elif normalizer.get("type") == "Sequence":
        kept = [step for step in normalizer["normalizers"] if step["type"] != "Prepend"]
        normalizer["normalizers"] = kept
    if settings == json.loads(before):
        return None
    shell = Tokenizer.from_str(json.dumps(settings))
    return _bare(backend.model, shell.pre_tokenizer, shell.normalizer)
