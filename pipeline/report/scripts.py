"""Which writing system a text is in: a stand-in for its language, from Unicode names alone."""

import functools
import re
import unicodedata
from collections import Counter

# Of a text only so many characters are looked at.
CHARS_READ = 4000
# Code, markup and role names are Latin in any language, so a fifth of other letters decides.
OTHER_SHARE = 0.2
_TAG = re.compile(r"<[^<>\n]{1,40}>")
# First word of a letter's Unicode name -> script; others are called by that word.
_NAMES = {
    "LATIN": "Latin",
    "FULLWIDTH": "Latin",
    "CJK": "Chinese (Han)",
    "HIRAGANA": "Japanese",
    "KATAKANA": "Japanese",
    "KATAKANA-HIRAGANA": "Japanese",
    "HALFWIDTH": "Japanese",
    "HANGUL": "Korean",
}
NO_LETTERS = "no letters"
UNKNOWN = "unknown"


def script_of(text: str) -> str:
    """The script of a text: the commonest one but Latin if it has a fifth of the letters.

    Control tokens written as <…> do not count. Han and kana together are Japanese.
    """
    letters = Counter(
        script
        for char in _TAG.sub(" ", text[:CHARS_READ])
        if (script := _script_of_char(char)) is not None
    )
    total = sum(letters.values())
    if not total:
        return NO_LETTERS
    if letters["Japanese"]:
        letters["Japanese"] += letters.pop("Chinese (Han)", 0)
    others = [(count, script) for script, count in letters.items() if script != "Latin"]
    count, script = max(others, default=(0, "Latin"))
    return script if count >= OTHER_SHARE * total else "Latin"


@functools.lru_cache(maxsize=2**14)
def _script_of_char(char: str) -> str | None:
    if not char.isalpha():
        return None
    word = unicodedata.name(char, "UNNAMED").split()[0]
    return _NAMES.get(word, word.capitalize())
