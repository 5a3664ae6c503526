"""Characters that gigatoken treats otherwise than `tokenizers`.

Their tables are of different versions of Unicode: what is a letter to one is none to the other, and
words are cut elsewhere. Measured with gigatoken 0.10.0 and `tokenizers` 0.23.3; a test in
tests/contracts measures the tables again.
"""

from functools import cache

import numpy as np

# Words are cut elsewhere at these, under one of the patterns that gigatoken takes. None of them has
# a meaning before Unicode 15.
CUT = """
88F C5C CDC 1ACF-1ADD 1AE0-1AEB A7CE-A7CF A7D2 A7D4 A7F1 10940-10959 10EC5-10EC7 10EFA-10EFB
11B60-11B67 11DB0-11DDB 11DE0-11DE9 16EA0-16EB8 16EBB-16ED3 16FF2-16FF6 187F8-187FF 18D09-18D1E
18D80-18DF2 1E6C0-1E6DE 1E6E0-1E6F5 1E6FE-1E6FF 2B73A-2B73F 2CEA2-2CEAD 323B0-33479
"""
# The normalizer NFC, the only one of Unicode that gigatoken takes, orders or composes these
# otherwise.
COMPOSED = """
7FD 897-89F 8CA-8D3 9FE C3C D3B-D3C EBA 1715 1ABF-1ACE 1DF6-1DFA A82C 105D2 105DA 10D24-10D27
10D69-10D6D 10EAB-10EAC 10EFD-10EFF 10F46-10F50 10F82-10F85 11070 1133B 11382 11384 1138B 11390
113C2 113CE-113D0 1145E 11839-1183A 1193D-1193E 11943 119E0 11A34 11A47 11A99 11D42 11D44-11D45
11D97 11F41-11F42 1611E 16121-16122 16129 1612F 16D63 16D67 16D69 16FF0-16FF1 1E08F 1E130-1E136
1E2AE 1E2EC-1E2EF 1E4EC-1E4EF 1E5EE-1E5EF
"""
BEYOND = 0x34000  # above all of them
ASCII = bytes(range(128))


@cache
def table_of(ranges: str) -> np.ndarray:
    """bool [BEYOND + 1]: the characters of these ranges; the last stands for all that follow."""
    table = np.zeros(BEYOND + 1, dtype=bool)
    for span in ranges.split():
        first, _, last = span.partition("-")
        table[int(first, 16) : int(last or first, 16) + 1] = True
    return table


def has_any(text: bytes, ranges: str) -> bool:
    """Whether a text in UTF-8 has a character of these ranges."""
    if text.isascii():
        return False
    rest = text.translate(None, ASCII).decode()  # most of it is ASCII in most texts
    characters = np.frombuffer(rest.encode("utf-32-le"), "<u4")
    return bool(table_of(ranges).take(characters, mode="clip").any())
