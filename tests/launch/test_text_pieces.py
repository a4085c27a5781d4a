"""Where texts are cut: at the ends of words, of which texts without white space have some too."""

import random
import warnings
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from te_dist.launch import text

SIGNS = "abzAZ019!\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~ \t\n\r\x1c\u3000"
WORDS = (
    "'s",
    "'ll",
    "'re",
    "'d",
    "''t",
    "é",
    "e\u0301",
    "½",
    "\u0663",
    "字",
    "の",
    "ヺ",
    "가",
    "。",
    "，",
    "\u200b",
    "\ua7d0",
)
WORDS_OF = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str


def words(written: str) -> list[str]:
    """What is encoded by itself."""
    return [word for word, _ in WORDS_OF(written)]


def test_no_gap_is_inside_of_a_word() -> None:
    draw, checked = random.Random(0), 0
    for _ in range(20000):
        written = "".join(draw.choices((*SIGNS, *WORDS), k=draw.randint(2, 12)))
        for gap in text.GAP.finditer(written):
            before, behind = written[: gap.start()], written[gap.start() :]
            assert words(before) + words(behind) == words(written), (before, behind)
            checked += 1
    assert checked > 20000


@pytest.mark.parametrize(
    "line",
    ["QUJD0RFZ+a/b9=", "x=f(y);", "字の字。字，", "0x1f,0x2e"],
    ids=["base64", "code", "without spaces", "bytes"],
)
def test_texts_without_white_space_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(text, "BLOCK", 64)
    (tmp_path / "1.txt").write_text(line * 1000, encoding="utf-8")
    pieces = list(text.pieces(text._inspect(tmp_path / "1.txt")))
    assert "".join(pieces) == line * 1000
    assert max(map(len, pieces)) <= 2 * 64


@pytest.mark.parametrize(("sign", "warns"), [("a", True), ("a1", False)], ids=["one word", "words"])
def test_a_long_run_that_nothing_cuts_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: str, warns: bool
) -> None:
    monkeypatch.setattr(text, "BLOCK", 64)
    monkeypatch.setattr(text, "LONGEST", 1000)
    (tmp_path / "long.txt").write_text(sign * 1001)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pieces = list(text.pieces(text._inspect(tmp_path / "long.txt")))
    assert "".join(pieces) == sign * 1001
    assert [("long.txt: got 1001 characters" in str(each.message)) for each in told] == [True] * warns
