"""What a token is, from its decoded text alone: its script, and the groups of --must-include."""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import pre_tokenizers

# Japanese: kana, their punctuation and half-width forms; and Han characters, see is_japanese.
_JAPANESE = re.compile("[\u3000-\u30ff\u31f0-\u31ff\uff66-\uff9f]")
_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
# Operators, arrows, letter-like symbols, mathematical alphabets, super- and subscripts.
_MATH = re.compile(
    "[²³¹\u2070-\u209f\u2100-\u214f\u2190-\u21ff\u2200-\u22ff\u27c0-\u27ef\u2980-\u2aff\U0001d400-\U0001d7ff]"
)
# What a token decodes to that is only some bytes of a character.
PART = "\ufffd"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def is_japanese(text: str) -> bool:
    """Kana or Japanese punctuation, or Han characters that all are in JIS X 0208.

    Unicode does not tell Japanese Han from Chinese; that standard lacks what only simplified
    Chinese writes, of which a large vocabulary has thousands.
    """
    han = _HAN.findall(text)
    return all(map(_in_jis, han)) and bool(han or _JAPANESE.search(text))


def _in_jis(character: str) -> bool:
    try:
        return bool(character.encode("shift_jis"))
    except UnicodeEncodeError:
        return False


def is_math(text: str) -> bool:
    """A mathematical character, or an operator of category Sm: + < = > | ~ ± × ÷ and so on.

    With no other letters beside it: <table> and <unused42> are none.
    """
    if any(c.isalpha() and not _MATH.match(c) for c in text):
        return False
    return any(_MATH.match(c) or unicodedata.category(c) == "Sm" for c in text)


def is_symbol(text: str) -> bool:
    """Symbols and punctuation (Unicode S and P), with neither letters nor digits."""
    kinds = {unicodedata.category(c)[0] for c in text}
    return PART not in text and not kinds & set("LN") and bool(kinds & set("SP"))


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
    """LATIN, CJK, HIRAGANA, … of the first letter; else digits, symbols, space, part or other."""
    if PART in text:
        return "part of a character"
    for character in text:
        if character.isalpha():
            return unicodedata.name(character, "OTHER").split()[0].split("-")[0]
    if any(c.isdigit() for c in text):
        return "digits"
    if is_symbol(text):
        return "symbols"
    return "space" if text and text.isspace() else "other"


def token_texts(tokenizer: Any, size: int) -> list[str]:
    """The decoded text of each id, PART for some bytes of a character, "" for no token."""
    known = sorted(i for i in tokenizer.get_vocab().values() if i < size)
    texts = [""] * size
    decoded = tokenizer.backend_tokenizer.decode_batch(
        [[i] for i in known], skip_special_tokens=False
    )
    for i, text, name in zip(known, decoded, tokenizer.convert_ids_to_tokens(known), strict=True):
        # Some decoders strip the space that begins a text, which may be the whole token.
        texts[i] = text or name.replace("▁", " ")
    return texts


def always_kept(tokenizer: Any, eos_ids: set[int]) -> set[int]:
    """Ids that no draft vocabulary may lack: special tokens, terminators, single bytes.

    Byte fallbacks are tokens named <0xNN>, or, in a byte-level vocabulary, the 256 letters that
    spell the bytes. Which of the two it is, the decoder says: a large vocabulary of characters
    has those letters as well.
    """
    vocab: dict[str, int] = tokenizer.get_vocab()
    kept = set(eos_ids) | set(tokenizer.all_special_ids)
    kept |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    kept |= {i for token, i in vocab.items() if _BYTE.fullmatch(token)}
    decoder = json.dumps(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
    if '"ByteLevel"' in decoder:
        kept |= {vocab[letter] for letter in pre_tokenizers.ByteLevel.alphabet() if letter in vocab}
    return kept
