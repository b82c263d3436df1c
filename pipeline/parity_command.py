"""`pipeline parity`: rows of real text through both backends of one GGUF file."""

from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.models.base import PositionedRow
from pipeline.models.load import (
    choose_backend,
    find_target,
    load_eos_ids,
    load_target,
    load_tokenizer,
)
from pipeline.parity import ParityReport, compare
from pipeline.prompts import PromptRow, read_prompts
from pipeline.seeds import row_seed

DEMO_PROMPTS = Path(__file__).parent / "data" / "demo_prompts.jsonl"
SHIFT_MAX = 1000


def compare_backends(
    target: str,
    *,
    prompts: str | None,
    rows: int,
    length: int,
    topk: int,
    kv_cache_dtype: str,
    threads: int,
) -> ParityReport:
    """Both backends on the same ids and offsets; llama.cpp, which serves, is the reference.

    Rows are the prompts' plain texts, so that a file without a chat template does as well; the
    first starts at position 0, the others at random ones up to SHIFT_MAX. States are float32.
    Raises PipelineError if the target is not a GGUF file or a backend is not there.
    """
    files = find_target(target)
    if files.kind != "gguf":
        raise PipelineError(f"--target {target}: parity compares two readers of one .gguf file")
    choose_backend(files, "llamacpp")
    tokenizer = load_tokenizer(files)
    positioned: list[PositionedRow] = []
    for row in read_prompts(prompts or str(DEMO_PROMPTS)):
        if not isinstance(row, PromptRow):
            continue
        text = "\n".join(message.content for message in row.messages)
        ids = tokenizer(text, add_special_tokens=True, return_tensors="np")["input_ids"][0]
        offset = row_seed(0, "parity", row.sample_id) % (SHIFT_MAX + 1) if positioned else 0
        positioned.append(PositionedRow(ids[:length].astype("int32"), offset))
        if len(positioned) == rows:
            break
    eos_ids = load_eos_ids(files, tokenizer)
    reference, other = (
        load_target(
            files,
            backend=backend,
            dtype="float32",
            kv_cache_dtype=kv_cache_dtype,
            device="cpu",
            threads=threads,
            max_length=length,
            eos_ids=eos_ids,
        )
        for backend in ("llamacpp", "transformers")
    )
    return compare(reference, other, positioned, topk)
