"""GGUF vocabulary -> a transformers tokenizer that gives llama.cpp's own token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from pipeline.errors import PipelineError
from pipeline.gguf.reader import GGUFFile
from pipeline.gguf.vocab import (
    BYTE,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"


def _llama3(digits: str) -> str:
    return (
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )  # fmt: skip


@dataclass(frozen=True)
class _PreTokenizer:
    """How llama.cpp cuts text before BPE: each pattern cuts the pieces the one before left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


# tokenizer.ggml.pre -> llama.cpp's rule for it
_PRE_TOKENIZERS = {
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "gpt-2": _PreTokenizer((_GPT2,)),
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama-bpe": _PreTokenizer((_llama3(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True),
    "qwen2": _PreTokenizer((_llama3(r"\p{N}"),)),
}


def gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """A tokenizer made of the file's own vocabulary, merges and token types.

    `encode(text, add_special_tokens=False)` gives the ids of llama.cpp (parse_special on,
    add_special off). `chat_template` is the file's own, or None. bos, eos, pad and unk are set
    where the file names them.

    Raises PipelineError naming the key for a vocabulary this loader cannot reproduce exactly.
    """
    vocabulary = read_vocabulary(file)
    builder = {"gpt2": _byte_level, "gemma4": _gemma4, "llama": _sentencepiece}.get(
        vocabulary.model
    )
    if builder is None:
        raise PipelineError(
            f"{file.path}: tokenizer.ggml.model is {vocabulary.model!r}; gpt2, gemma4 and llama "
            "are supported (use --backend llamacpp)"
        )
    tokenizer, add_bos = builder(file, vocabulary)
    _add_special_tokens(tokenizer, vocabulary)
    _set_post_processor(tokenizer, file, vocabulary, add_bos)
    context = file.metadata.get(f"{file.architecture}.context_length")
    named = {
        f"{role}_token": vocabulary.tokens[i]
        for role, i in (
            ("bos", vocabulary.bos_id),
            ("eos", vocabulary.eos_id),
            ("pad", vocabulary.pad_id),
            ("unk", vocabulary.unknown_id),
        )
        if i is not None
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=_chat_template(file),
        clean_up_tokenization_spaces=False,
        model_max_length=context if isinstance(context, int) else None,
        **named,
    )


def _chat_template(file: GGUFFile) -> str | None:
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise PipelineError(f"{file.path}: the key tokenizer.chat_template is not text")
    return template or None


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    """The file's merges in rank order; the halves are separated by the first space after byte 0."""
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or (merges and not isinstance(merges[0], str)):
        raise PipelineError(
            f"{file.path}: the key tokenizer.ggml.merges is missing or no text list"
        )
    pairs = []
    for number, merge in enumerate(merges):
        at = merge.find(" ", 1)
        if at < 0:
            raise PipelineError(
                f"{file.path}: tokenizer.ggml.merges[{number}] is {merge!r}, no pair"
            )
        pairs.append((merge[:at], merge[at + 1 :]))
    return pairs


def _known_merges(file: GGUFFile, index: dict[str, int]) -> list[tuple[str, str]]:
    """The merges whose halves and result are tokens: others cannot change what is emitted."""
    pairs = _merges(file)
    known = [(a, b) for a, b in pairs if a in index and b in index and a + b in index]
    if len(known) != len(pairs):
        bad = next(p for p in pairs if not {p[0], p[1], p[0] + p[1]} <= index.keys())
        raise PipelineError(
            f"{file.path}: tokenizer.ggml.merges names {bad[0]!r} + {bad[1]!r}, which is not made "
            "of tokens of the vocabulary; convert the model again"
        )
    return known


def _index(vocabulary: Vocabulary) -> dict[str, int]:
    return {text: i for i, text in enumerate(vocabulary.tokens)}


def _byte_level(file: GGUFFile, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        raise PipelineError(
            f"{file.path}: tokenizer.ggml.pre is {name!r}; {', '.join(sorted(_PRE_TOKENIZERS))} "
            "are supported (use --backend llamacpp)"
        )
    index = _index(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocab=index, merges=_known_merges(file, index), ignore_merges=pre.ignore_merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(p), behavior="isolated") for p in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _gemma4(file: GGUFFile, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece-like BPE: spaces as ▁, no word splitting but at runs of newlines."""
    index = _index(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocab=index, merges=_known_merges(file, index), byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), behavior="isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer, True


def _sentencepiece(file: GGUFFile, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE: the pair whose union scores best merges first; unknown bytes as <0xXX>."""
    index = _index(vocabulary)
    missing = [b for b in range(256) if f"<0x{b:02X}>" not in index]
    if missing:
        raise PipelineError(
            f"{file.path}: tokenizer.ggml.tokens lacks the byte token <0x{missing[0]:02X}>"
        )
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    if file.metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        raise PipelineError(
            f"{file.path}: tokenizer.ggml.remove_extra_whitespaces is not supported"
        )
    tokenizer = Tokenizer(
        models.BPE(vocab=index, merges=_scored_merges(vocabulary, index), byte_fallback=True)
    )
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _scored_merges(vocabulary: Vocabulary, index: dict[str, int]) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, best-scoring token first."""
    order = sorted(range(len(vocabulary.tokens)), key=lambda i: -vocabulary.scores[i])
    pairs = []
    for i in order:
        text = vocabulary.tokens[i]
        if vocabulary.types[i] == BYTE:
            continue
        for cut in range(1, len(text)):
            if text[:cut] in index and text[cut:] in index:
                pairs.append((text[:cut], text[cut:]))
    return pairs


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Control, unknown and user-defined tokens are cut out of the text before anything else."""
    kinds = (CONTROL, UNKNOWN, USER_DEFINED)
    tokenizer.add_tokens(
        [
            AddedToken(text, special=kind != USER_DEFINED, normalized=False)
            for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if kind in kinds
        ]
    )


def _set_post_processor(
    tokenizer: Tokenizer, file: GGUFFile, vocabulary: Vocabulary, add_bos: bool
) -> None:
    """Add bos and eos where the file asks for them (only with add_special_tokens=True)."""
    metadata = file.metadata
    around: list[Sequence[int | None]] = [
        [vocabulary.bos_id] if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else [],
        [vocabulary.eos_id] if metadata.get("tokenizer.ggml.add_eos_token", False) else [],
    ]
    if any(None in ids for ids in around):
        raise PipelineError(
            f"{file.path}: tokenizer.ggml.add_bos_token or add_eos_token is set but the file "
            "names no such token"
        )
    before, after = ([vocabulary.tokens[i] for i in ids if i is not None] for ids in around)
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(t, tokenizer.token_to_id(t)) for t in {*before, *after}],
        )
