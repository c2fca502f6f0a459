from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import backend_of, kinds, prose
from tokenizers import Tokenizer

from infllm_cli.decoding import IncrementalDecoder
from infllm_cli.tokens import PlainTokenizer


def stream(backend: Tokenizer, ids) -> list[str]:
    decoder = IncrementalDecoder(backend)
    return [*(decoder.push(id) for id in ids), decoder.finish()]


@kinds
def test_streamed_text_is_the_decoded_text(kind):
    backend = backend_of(kind)
    ids = backend.encode(prose(3000), add_special_tokens=False).ids
    assert "".join(stream(backend, ids)) == backend.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "llama2_like"])
def test_emoji_split_over_tokens_comes_out_whole(kind):
    backend = backend_of(kind)
    ids = PlainTokenizer(backend).encode("a🧿 b👩\u200d👩\u200d👧").ids
    parts = stream(backend, ids)
    assert "".join(parts) == "a🧿 b👩\u200d👩\u200d👧"
    assert not any("\ufffd" in part for part in parts)
    assert any("🧿" in part for part in parts)


@pytest.mark.parametrize("kind", ["byte_level", "llama2_like"])
def test_incomplete_character_at_the_end_is_dropped(kind):
    backend = backend_of(kind)
    ids = PlainTokenizer(backend).encode("a🧿").ids
    assert "".join(stream(backend, ids[:-1])) == "a"


@pytest.mark.parametrize("kind", ["byte_level", "llama2_like"])
def test_special_tokens_are_left_out_and_cost_no_space(kind):
    backend = backend_of(kind)
    whale = backend.encode("the whale", add_special_tokens=False).ids
    end = backend.token_to_id("<|im_end|>")
    ids = [end, *whale[:1], end, *whale[1:], end]
    assert "".join(stream(backend, ids)) == "the whale"


@kinds
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ids_decode_without_an_error(kind, data):
    backend = backend_of(kind)
    size = backend.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 20), max_size=30))
    decoder = IncrementalDecoder(backend)
    parts = [decoder.push(id) for id in ids]
    assert not any(part.endswith("\ufffd") for part in parts)
    assert not decoder.finish().endswith("\ufffd")
    assert decoder.finish() == ""
