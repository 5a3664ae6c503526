import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infini_llama.tasks.preprocess.tokenizers.encoder import encoder_of
from infini_llama.tasks.preprocess.tokenizers.tokenizer import EOS, EOS_ID, token_bytes, train_bpe

TEXTS = ["the cat sat on the mat", "def value(self): return self.value", f"it says {EOS} and {EOS}{EOS}"] * 20


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(iter(TEXTS), vocab_size=300)


def test_end_of_text_is_id_0_and_every_byte_has_a_token(tokenizer):
    assert tokenizer.token_to_id(EOS) == EOS_ID == 0
    assert tokenizer.get_vocab_size() == 300
    assert (token_bytes(tokenizer) == 1).sum() == 256


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200) | st.lists(st.sampled_from([EOS, "<|", "endoftext", "|>", " ", "the"])).map("".join))
@example(text=EOS)
@example(text=f" {EOS}\n{EOS}{EOS}x")
def test_any_text_survives_yields_no_end_of_text_and_its_tokens_stand_for_its_bytes(tokenizer, text):
    encoder = encoder_of(tokenizer)
    ids = encoder.encode(text, add_special_tokens=False).ids
    assert EOS_ID not in ids
    assert encoder.decode(ids, skip_special_tokens=False) == text
    assert token_bytes(tokenizer)[ids].sum() == len(text.encode())
    assert [encoding.ids for encoding in encoder.encode_batch_fast([text], add_special_tokens=False)] == [ids]


def test_even_a_vocabulary_full_of_the_end_of_text_marker_does_not_yield_it():
    encoder = encoder_of(train_bpe([EOS * 50] * 50, vocab_size=600))
    assert EOS_ID not in encoder.encode(EOS * 3 + f" {EOS}", add_special_tokens=False).ids


def test_token_bytes_of_the_end_of_text_token_is_0(tokenizer):
    lengths = token_bytes(tokenizer)
    assert lengths.dtype == np.int32 and lengths.shape == (300,)
    assert lengths[EOS_ID] == 0 and (lengths[1:] > 0).all()
