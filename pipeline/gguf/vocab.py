"""The vocabulary of a GGUF file, with llama.cpp's own rules for which tokens are special.

llama.cpp knows some tokens by their text, whatever type the file gives them: end-of-generation
and fill-in-the-middle markers become control tokens. The tokenizer and the stop set follow it,
so that an id means the same here and in the model that is served.
"""

from dataclasses import dataclass
from typing import Any

from pipeline.errors import PipelineError
from pipeline.gguf.reader import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_END_TEXTS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
})  # fmt: skip
_FIM_TEXTS = {
    "pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
            "<|code_prefix|>", "<|prefix|>"),
    "suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
            "<|code_suffix|>", "<|suffix|>"),
    "mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
            "<|code_middle|>", "<|middle|>"),
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "sep": ("<|file_sep|>",),
}  # fmt: skip
_FIM_THAT_END = ("pad", "rep", "sep")
# Where a file names none, llama.cpp's defaults for the SentencePiece ("llama") model.
_SPM_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}
_ID_KEYS = ("bos", "eos", "eot", "eom", "unknown", "padding", "mask")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens of a file. types: llama.cpp's token type of each id, after its corrections.

    special_ids: kind (bos, eos, eot, eom, unknown, padding, mask, fim_*) -> id.
    end_ids: every id that llama.cpp treats as end of generation.
    """

    model: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    special_ids: dict[str, int]
    end_ids: frozenset[int]

    @property
    def bos_id(self) -> int | None:
        return self.special_ids.get("bos")

    @property
    def eos_id(self) -> int | None:
        return self.special_ids.get("eos")

    @property
    def pad_id(self) -> int | None:
        return self.special_ids.get("padding")

    @property
    def unknown_id(self) -> int | None:
        return self.special_ids.get("unknown")


def gguf_eos_ids(file: GGUFFile) -> frozenset[int]:
    """Every id at which llama.cpp stops for this file.

    The file's eos, eot and eom ids, and tokens that llama.cpp knows by their text (<|im_end|>,
    <end_of_turn>, <turn|>, …). Raises PipelineError for ids outside the vocabulary, or if none.
    """
    ends = read_vocabulary(file).end_ids
    if not ends:
        raise PipelineError(
            f"{file.path}: no end-of-generation token: tokenizer.ggml.eos_token_id is missing and "
            "no token is a known end marker; set it in the file"
        )
    return ends


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Tokens, types, scores and special ids, checked against each other.

    Raises PipelineError naming the key for a missing, short or duplicate entry and for a special
    id outside the vocabulary.
    """
    model = file.metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str):
        raise PipelineError(f"{file.path}: the key tokenizer.ggml.model is missing")
    tokens = _tokens(file)
    types = _per_token(file, "token_type", len(tokens), NORMAL)
    ids = _special_ids(file, model, len(tokens))
    index = {text: i for i, text in enumerate(tokens)}
    fim = {
        k: next((index[t] for t in texts if t in index), None) for k, texts in _FIM_TEXTS.items()
    }
    for kind, found in fim.items():
        if found is not None:
            ids.setdefault(f"fim_{kind}", found)
    ends = {index[t] for t in _END_TEXTS if t in index}
    ends.update(ids[f"fim_{k}"] for k in _FIM_THAT_END if f"fim_{k}" in ids)
    ends.update(ids[k] for k in ("eos", "eot", "eom") if k in ids)
    for i in [
        *(i for i in ends if tokens[i] in _END_TEXTS),
        *(i for i in fim.values() if i is not None),
    ]:
        types[i] = CONTROL
    _exceptions(tokens, types, ends)
    return Vocabulary(
        model=model,
        tokens=tokens,
        types=types,
        scores=_per_token(file, "scores", len(tokens), 0.0),
        special_ids=ids,
        end_ids=frozenset(ends),
    )


def _exceptions(tokens: list[str], types: list[int], ends: set[int]) -> None:
    """llama.cpp takes back two end markers that some vocabularies use for something else."""
    by_text = {tokens[i]: i for i in ends}
    if "<|end|>" in by_text and (
        {"<|return|>", "<|call|>"} <= by_text.keys()
        or ("<|flush|>" in by_text and ({"<|call|>", "<|calls|>"} & by_text.keys()))
    ):
        ends.discard(by_text["<|end|>"])
        types[by_text["<|end|>"]] = USER_DEFINED
    if {"<|tool_response>", "</s>"} <= by_text.keys():
        ends.discard(by_text["</s>"])
        types[by_text["</s>"]] = NORMAL


def _tokens(file: GGUFFile) -> list[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise PipelineError(
            f"{file.path}: the key tokenizer.ggml.tokens is missing or no text list"
        )
    named = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
    if len(set(named)) != len(named):
        seen: dict[str, int] = {}
        for i, text in enumerate(named):
            if text in seen:
                raise PipelineError(
                    f"{file.path}: tokenizer.ggml.tokens has {text!r} twice (ids {seen[text]} "
                    f"and {i}); llama.cpp refuses such a file too"
                )
            seen[text] = i
    return named


def _per_token(file: GGUFFile, name: str, count: int, default: Any) -> list[Any]:
    key = f"tokenizer.ggml.{name}"
    values = file.metadata.get(key)
    if values is None:
        return [default] * count
    if not isinstance(values, list) or len(values) < count or isinstance(values[0], str):
        raise PipelineError(
            f"{file.path}: the key {key} does not hold a number for each of {count} tokens"
        )
    return list(values[:count])


def _special_ids(file: GGUFFile, model: str, count: int) -> dict[str, int]:
    defaults = _SPM_DEFAULTS if model == "llama" else {}
    ids = {kind: i for kind, i in defaults.items() if i < count}
    for kind in (*_ID_KEYS, *(f"fim_{k}" for k in _FIM_TEXTS)):
        key = f"tokenizer.ggml.{kind}_token_id"
        value = file.metadata.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise PipelineError(
                f"{file.path}: the key {key} is {value!r}, outside the vocabulary of {count} "
                "tokens; mend the file (gguf_set_metadata) or convert the model again"
            )
        ids[kind] = value
    return ids
