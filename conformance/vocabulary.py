"""A small vocabulary and a slow, obvious tokenizer, for the tests of everything that touches text."""

import itertools
import unicodedata
from collections import Counter

import regex
from hypothesis import settings
from hypothesis import strategies as st

from runtime.text.tokenizer import Tokenizer

settings.register_profile("conformance", deadline=None)  # no timing decides a test
settings.load_profile("conformance")

MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

SAMPLE = """The capital of France is Paris. "Hello, world!" they've said; we're here, I'M THERE, don't.
system user assistant tool message think response tools call argument type="string" key="city" index="1"
<|open|><|close|><|sep|><|end_of_msg|> {"a": [1, true, null], "days": 2} 1234567 ==> <|media_begin|>
你好，世界！漢字漢字 élève naïve Ὀδυσσεύς שלום مرحبا नमस्ते 😀👍🏽 café\r\n\tand lines\u00a0end    \n\n  x
"""


def merge(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """BPE as its definition reads: the whole piece if it has a rank, else the lowest pair, leftmost, again."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def train(text: str, n_ranks: int) -> list[bytes]:
    """Byte pairs by frequency: the 256 bytes, then merges until there are `n_ranks`."""
    ranks = [bytes([i]) for i in range(256)]
    words = [[w[i : i + 1] for i in range(len(w))] for w in (p.encode() for p in SPLIT_REGEX.findall(text))]
    while len(ranks) < n_ranks:
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        (a, b), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        ranks.append(a + b)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == (a, b):
                    word[i : i + 2] = [a + b]
                i += 1
    return ranks


# The split once more, for another engine and without set intersection: U, L and C as the specification has them.
_U = r"(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
_L = r"(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])"
_C = r"(?:'(?i:s|t|re|ve|m|ll|d))?"
SPLIT_REGEX = regex.compile(
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_U}*{_L}+{_C}|[^\r\n\p{{L}}\p{{N}}]?{_U}+{_L}*{_C}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOKENIZER = Tokenizer(train(SAMPLE, 256 + 240))

# Characters as old as Unicode 3.2: engines disagree about ones newer than their own tables, and may.
_OLD = [c for c in map(chr, range(0x30000)) if unicodedata.ucd_3_2_0.category(c) not in ("Cn", "Cs", "Co")]
_TRICKY = list("aAbB1 \t\n\r'stTrRdDmM漢字あéÉ\u0301ſKאǅʰ٣Ⅷ<|>=\"&!\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u3000\u200b😀")

characters = st.sampled_from(_TRICKY) | st.sampled_from(_OLD)
fragments = st.sampled_from([*MARKERS, "[BOS]", "they'LL", "I'M", "  ", "\r\n", "&quot;", "&amp;", '="', "你好"])
texts = st.lists(characters | fragments, max_size=40).map("".join)
"""Text that tries the seams: case, contractions, marks, digits, every kind of space, markers, escapes."""
