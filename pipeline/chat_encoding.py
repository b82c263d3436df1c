"""Texts to token ids, and what becomes of a control token's name in a text."""

import hashlib
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.errors import RowReject
from pipeline.prompt_turns import Message

Int32Array = npt.NDArray[np.int32]
Value = TypeVar("Value")


class TextEncoder:
    """A tokenizer that adds nothing, with marks that stand for control tokens' names."""

    def __init__(
        self,
        tokenizer: Any,
        control_ids: Collection[int],
        control_tokens: Literal["reject", "text"],
    ) -> None:
        """control_tokens: whether such names are refused in texts, or stay text."""
        self._tokenizer = tokenizer
        self.control_ids = frozenset(control_ids)
        added = tokenizer.added_tokens_decoder
        names = [str(added[i].content) for i in self.control_ids if i in added]
        if control_tokens == "reject":
            names = []
        # Longest first: <|im_start|> before <|im.
        self._shields = {_shield(name): name for name in sorted(names, key=len, reverse=True)}
        self._names = _any_of(self._shields.values())
        self._marks = _any_of(self._shields)

    def encode(self, text: str) -> Int32Array:
        """Token ids of a text, int32 [n]; special tokens in it count, none are added."""
        if self._marks is None or not self._marks.search(text):
            return self._encode(text)
        pieces: list[str] = []
        for part in re.split(f"({self._marks.pattern})", text):
            name = self._shields.get(part)
            # Cut after its first character, a control token's name is none any more.
            pieces += [part] if name is None else [name[:1], name[1:]]
        return np.concatenate([self._encode(piece) for piece in pieces if piece])

    def _encode(self, text: str) -> Int32Array:
        encoding = self._tokenizer(
            text,
            add_special_tokens=False,
            truncation=False,
            padding=False,
            return_attention_mask=False,
            verbose=False,
        )
        return np.asarray(encoding["input_ids"], dtype=np.int32)

    def shielded(self, value: Value) -> Value:
        """A turn, or a tool, with a mark in place of each name, where those stay text."""
        if self._names is None:
            return value
        names = self._names
        made: Value = with_texts(value, lambda text: names.sub(lambda m: _shield(m.group()), text))
        return made

    def check(self, value: Message | dict[str, Any], what: str) -> None:
        """Raise RowReject control_token where a text would be read as the template's markup."""
        unknown = self._tokenizer.unk_token_id
        for text in texts_in(value):
            for token_id in sorted(self.control_ids.intersection(self.encode(text).tolist())):
                token = str(self._tokenizer.convert_ids_to_tokens(token_id))
                # The id for unknown characters also comes from ordinary text.
                if token_id != unknown or token in text:
                    raise RowReject("control_token", f"{what} contains {token!r}")


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with each text in it changed: of lists and objects, and a turn but for its role."""
    if isinstance(value, Message):
        changed = {
            name: with_texts(field, change)
            for name, field in value._asdict().items()
            if name != "role"
        }
        return value._replace(**changed)
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(with_texts(item, change) for item in value)
    if isinstance(value, dict):
        return {change(key): with_texts(item, change) for key, item in value.items()}
    return value


def texts_in(value: Any) -> list[str]:
    """All texts that `with_texts` would change."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    with_texts(value, note)
    return found


def letters_of(seed: str) -> str:
    """A word of 33 letters. Letters survive every template's stripping and quoting."""
    digest = hashlib.sha256(seed.encode()).digest()
    return "Q" + "".join(chr(ord("a") + byte % 26) for byte in digest)


def _shield(name: str) -> str:
    return letters_of(f"control token {name}")


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Finds any of the texts; None if there is none."""
    found = "|".join(map(re.escape, texts))
    return re.compile(found) if found else None
