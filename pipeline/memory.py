"""What to do when the accelerator's memory does not hold a micro-batch: half of it, then half."""

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from pipeline.errors import RowReject

Item = TypeVar("Item")
Result = TypeVar("Result")


def halving(
    run: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item]
) -> list[Result | RowReject]:
    """`run(items)`, in order; where torch runs out of memory, the halves one after the other.

    An item that does not fit alone gives a RowReject `out_of_memory` in its place.
    """
    try:
        return list(run(items))
    except torch.OutOfMemoryError as error:
        said = str(error).splitlines()[0]
    # Not in the handler: the exception's traceback still holds the tensors there.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if len(items) == 1:
        return [RowReject("out_of_memory", f"the row alone does not fit: {said}")]
    middle = len(items) // 2
    return halving(run, items[:middle]) + halving(run, items[middle:])
