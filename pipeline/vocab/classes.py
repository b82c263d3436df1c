"""What a token is, from its decoded text alone: its script, and the groups of --must-include."""

import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

# Japanese: kana, kanji, their punctuation and half-width forms.
_JAPANESE = re.compile(
    "[\u3000-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f]"
)
# Operators, arrows, letter-like symbols, mathematical alphabets, super- and subscripts.
_MATH = re.compile(
    "[\u2070-\u209f\u2100-\u214f\u2190-\u21ff\u2200-\u22ff\u27c0-\u27ef\u2980-\u2aff\U0001d400-\U0001d7ff]"
)
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def is_japanese(text: str) -> bool:
    return _JAPANESE.search(text) is not None


def is_math(text: str) -> bool:
    """A mathematical character, or an operator of category Sm: + < = > | ~ ± × ÷ and so on."""
    return _MATH.search(text) is not None or any(unicodedata.category(c) == "Sm" for c in text)


def is_symbol(text: str) -> bool:
    """Symbols and punctuation (Unicode S and P), with neither letters nor digits."""
    letters = any(unicodedata.category(c)[0] in "LN" for c in text)
    return not letters and any(unicodedata.category(c)[0] in "SP" for c in text)


def is_code(text: str) -> bool:
    """What code is laid out with: ASCII punctuation, operators, digits, indentation, line ends."""
    return text.isascii() and bool(text) and not any(c.isalpha() for c in text)


GROUPS: Mapping[str, Callable[[str], bool]] = {
    "japanese": is_japanese,
    "math": is_math,
    "symbols": is_symbol,
    "code": is_code,
}


def script_of(text: str) -> str:
    """LATIN, CJK, HIRAGANA, … of the first letter; else digits, symbols, space or other."""
    for character in text:
        if character.isalpha():
            return unicodedata.name(character, "OTHER").split()[0].split("-")[0]
    if any(c.isdigit() for c in text):
        return "digits"
    if is_symbol(text):
        return "symbols"
    return "space" if text and text.isspace() else "other"


def token_texts(tokenizer: Any, size: int) -> list[str]:
    """The decoded text of each id; of a part of a character, the replacement character."""
    known = set(tokenizer.get_vocab().values())
    return [tokenizer.decode([i]) if i in known else "" for i in range(size)]


def always_kept(tokenizer: Any, eos_ids: set[int]) -> set[int]:
    """Ids that no draft vocabulary may lack: special tokens, terminators, single bytes.

    Byte fallbacks are tokens named <0xNN>, or, in a byte-level vocabulary (which spells a space as
    Ġ), the 256 of one symbol.
    """
    vocab: dict[str, int] = tokenizer.get_vocab()
    kept = set(eos_ids) | set(tokenizer.all_special_ids)
    kept |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    kept |= {i for token, i in vocab.items() if _BYTE.fullmatch(token)}
    if any(token.startswith("Ġ") for token in vocab):
        kept |= {i for token, i in vocab.items() if len(token) == 1}
    return kept
