"""A small Gemma-4 style tokenizer, for Hugging Face and for GGUF from one vocabulary.

Byte-pair merges over text whose spaces became "▁", with byte fallback and no other splitting;
llama.cpp also splits at newlines, so no merge here crosses one.
"""

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pipeline.errors import PipelineError

# In Gemma-4's order; the three that end an answer there end one here.
SPECIAL_TOKENS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
    "<|turn>",
    "<turn|>",
    "<|tool_response>",
    "<|channel>",
    "<channel|>",
    "<|think|>",
)
PAD, EOS, BOS, UNK, MASK, _, TURN_END, TOOL_RESPONSE = range(8)
EOS_IDS = (EOS, TURN_END, TOOL_RESPONSE)

# Jinja, in the shape of Gemma-4's: a system turn of its own, `model` for the assistant, the
# thinking switch in the system turn, and content as text or as a list of text parts.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content | trim }}
{%- else -%}{%- for part in content if part.type == 'text' -%}{{ part.text | trim }}\
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- set has_system = messages and messages[0].role in ['system', 'developer'] -%}
{%- if has_system or enable_thinking -%}
{{ '<|turn>system\\n' }}{{ '<|think|>' if enable_thinking }}
{%- if has_system -%}{{ text(messages[0].content) }}{%- endif -%}
{{ '<turn|>\\n' }}
{%- endif -%}
{%- for message in (messages[1:] if has_system else messages) -%}
{%- if message.role not in ['user', 'assistant'] -%}
{{ raise_exception('a turn may be user or assistant, not ' ~ message.role) }}
{%- endif -%}
{{ '<|turn>' ~ ('model' if message.role == 'assistant' else 'user') ~ '\\n' }}
{{- text(message.content) ~ '<turn|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|turn>model\\n' }}{%- endif -%}
"""

_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then it goes home to the other animals in the "
    "forest where they are waiting for the weather to get better this is the text that the merges "
    "of a small model come from so it holds the most common words of english such as of and to in "
    "is that it was for on are as with his they at be this from have or by one had not but what "
    "all were when we there can an your which their said if do will each about how up out them "
    "then she many some so these would other into has more her two like him see time could no make "
    "than first been its who now people my made over did down only way find use may water long "
    "little very after words called just where most know def return self import None True False "
    "print range class for in while with open lambda "
    "これ は テスト です 日本 語 の 文章 を 書き ます ありがとう ございます "
    "今日 は いい 天気 です ね "
    "déjà vu naïve café über straße señor año"
)


NORMAL, CONTROL, BYTE = 1, 3, 6  # GGUF token types
ASCII_LETTERS = {chr(code) for code in range(33, 127)} | {"\n", "▁"}


@dataclass(frozen=True, kw_only=True)
class TinyVocabulary:
    """tokens by id; merges by rank; kinds: GGUF token types."""

    tokens: list[str]
    merges: list[tuple[str, str]]
    kinds: list[int]


def tiny_vocabulary(size: int) -> TinyVocabulary:
    """Special tokens, 256 bytes, ASCII and the corpus's letters, merges, then `<unusedN>`.

    Raises PipelineError if size cannot hold what comes before the merges.
    """
    letters = ASCII_LETTERS | set(_CORPUS) - {" "}
    room = size - len(SPECIAL_TOKENS) - 256 - len(letters)
    merges = _learn_merges([f"▁{word}" for word in _CORPUS.split()], max(0, room - 1))
    return make_vocabulary(letters, merges, size)


def make_vocabulary(
    letters: Collection[str], merges: Sequence[tuple[str, str]], size: int
) -> TinyVocabulary:
    """Special tokens, 256 bytes, the letters sorted, what the merges make, then `<unusedN>`.

    Before the given merges comes that of two newlines, which Gemma-4 has as well. Merges that make
    the same token share it; those after the last token that fits are left out.
    Raises PipelineError if size cannot hold what comes before the merges.
    """
    tokens = list(SPECIAL_TOKENS) + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [CONTROL] * len(SPECIAL_TOKENS) + [BYTE] * 256
    tokens += sorted(letters)
    if size < len(tokens):
        raise PipelineError(f"a tiny vocabulary needs at least {len(tokens)} tokens, not {size}")
    ids = dict.fromkeys(tokens)  # an ordered set
    kept: list[tuple[str, str]] = []
    for pair in [("\n", "\n"), *merges]:
        if "".join(pair) not in ids and len(ids) == size:
            break
        ids["".join(pair)] = None
        kept.append(pair)
    tokens = list(ids)
    tokens += [f"<unused{index}>" for index in range(size - len(tokens))]
    kinds += [NORMAL] * (size - len(kinds))
    return TinyVocabulary(tokens=tokens, merges=kept, kinds=kinds)


def read_hf_vocabulary(folder: Path) -> TinyVocabulary:
    """What `write_hf_tokenizer` wrote into a directory."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    bytes_end = len(SPECIAL_TOKENS) + 256
    return TinyVocabulary(
        tokens=tokens,
        merges=[(left, right) for left, right in model["merges"]],
        kinds=[CONTROL] * len(SPECIAL_TOKENS) + [BYTE] * 256 + [NORMAL] * (len(tokens) - bytes_end),
    )


def _learn_merges(words: list[str], count: int) -> list[tuple[str, str]]:
    """Byte-pair encoding: the most frequent pair first, ties to the pair that sorts first."""
    pieces = Counter(tuple(word) for word in words)
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for piece, times in pieces.items():
            for pair in pairwise(piece):
                pairs[pair] += times
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        merged: Counter[tuple[str, ...]] = Counter()
        for piece, times in pieces.items():
            merged[_join(piece, best)] += times
        pieces = merged
    return merges


def _join(piece: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for part in piece:
        # out[-1] may itself be a fresh merge; it then differs from pair[0], which is shorter.
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return tuple(out)


def write_hf_tokenizer(out: Path, vocabulary: TinyVocabulary) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `out`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=vocabulary.merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "padding_side": "left",
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")
