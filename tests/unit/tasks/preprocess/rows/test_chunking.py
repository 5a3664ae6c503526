import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from infini_llama.tasks.preprocess.rows.packing import row_count, row_starts


@given(tokens=st.integers(1, 5000), length=st.integers(2, 600), stride=st.integers(1, 600) | st.none())
def test_rows_are_every_place_where_a_row_and_its_last_label_fit(tokens, length, stride):
    step = min(stride or length, length)
    starts = row_starts(row_count(tokens, length, step if stride else None), step)
    assert starts.dtype == np.int64
    assert starts.tolist() == [start for start in range(0, tokens, step) if start + length + 1 <= tokens]


def test_offsets_beyond_32_bits_are_exact():
    assert row_starts(1023, 2**42 + 1)[-1] == 1022 * (2**42 + 1)
