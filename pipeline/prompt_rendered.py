"""Prompts that come as the target model reads them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.errors import RowReject
from pipeline.prompt_rows import MASK_KEY, NumberText, quote


class Rendered(NamedTuple):
    """A prompt as the target model reads it: text with its control tokens, or ids.

    loss_mask: 1 on the ids that are answers, where the row says so.
    """

    text: str | None
    ids: tuple[int, ...] | None
    loss_mask: tuple[int, ...] | None


def read_ids(row: Mapping[str, Any]) -> Rendered:
    """The row's `input_ids`, perhaps with their `loss_mask`.

    Raises RowReject: bad_token_ids, bad_loss_mask, empty_conversation.
    """
    ids = _read_numbers(row["input_ids"], "input_ids", "bad_token_ids")
    if not ids:
        raise RowReject("empty_conversation", "input_ids is an empty list")
    mask = None
    if row.get(MASK_KEY) is not None:
        mask = _read_numbers(row[MASK_KEY], MASK_KEY, "bad_loss_mask")
        if len(mask) != len(ids) or not set(mask) <= {0, 1}:
            detail = f"{MASK_KEY} must be 0 or 1 for each of the {len(ids)} input_ids"
            raise RowReject("bad_loss_mask", detail)
    return Rendered(None, ids, mask)


def _read_numbers(values: object, key: str, reason: str) -> tuple[int, ...]:
    """Whole numbers from 0 on, below 2**31."""
    if not isinstance(values, list):
        raise RowReject(reason, f"{key} must be a list, not {type(values).__name__}")
    numbers = []
    for index, value in enumerate(values):
        if isinstance(value, NumberText) and value.isdecimal() and len(value) <= 10:
            value = int(value)
        if type(value) is not int or not 0 <= value < 2**31:
            raise RowReject(reason, f"{key}[{index}] is {quote(value)}, not a whole number")
        numbers.append(value)
    return tuple(numbers)
