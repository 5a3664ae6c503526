"""Values of options, as the parser reads them."""

import pytest

from infini_llama.flows.cli.parser import build_parser


@pytest.mark.parametrize("option", ["--lengths", "--context"])
def test_lengths_have_units(option):
    parsed = build_parser().parse_args(["evaluate", "run", "--passkey", option, "4096", "128k", "1m", "1.5M"])
    assert parsed.lengths == [4096, 128_000, 1_000_000, 1_500_000]


@pytest.mark.parametrize("length", ["0", "k", "3 lines", "-5", ""])
def test_what_is_no_number_of_tokens_is_refused(length):
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["evaluate", "run", "--passkey", "--lengths", length])
    assert ended.value.code == 64
