"""A tiny random Llama on disk, with a byte-level tokenizer and a ChatML template."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# ChatML over a byte-level tokenizer: the 256 byte symbols, then these.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTEXT_LENGTH = 1024


def write_tiny_llama(path: Path) -> None:
    """A Hugging Face directory: Llama, 2 layers, hidden 32, 2 KV heads of 8, 259 byte tokens."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(path)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        initializer_range=0.2,  # the usual 0.02 gives nearly uniform teacher rows
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).eval().save_pretrained(path)


def run_tiny_llama(model: Path, base: Path, **changes: Any) -> Path:
    """The folder of a finished run: 9 rows in, 2 rejected; 2 rollout parts, 2 shards.

    changes: settings that are to differ.
    """
    from pipeline.execute import LocalWorker, execute
    from pipeline.settings import Settings

    base.mkdir(exist_ok=True)
    # Long enough that the features pass 1.5 MB, which makes two shards.
    texts = ["Hi! " * 60, "日本語で? " * 20, "1+1 " * 80, "def f(x):\n" * 25, "Why?", "A b c " * 60]
    rows = [
        {"id": f"row-{i}", "messages": [{"role": "user", "content": text}]}
        for i, text in enumerate(texts)
    ]
    turns = [("user", "One"), ("assistant", "x"), ("user", "Two " * 50)]
    rows.append({"id": "turns", "messages": [{"role": r, "content": c} for r, c in turns]})
    rows.append({"id": "empty", "messages": []})
    lines = [*(json.dumps(row) for row in rows), "not json"]
    prompts = base / "prompts.jsonl"
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    given = {
        "target": str(model),
        "prompts": str(prompts),
        "out": str(base / "out"),
        "max_new_tokens": 96,
        "temperature": 1.0,
        "seed": 7,
        "rollout_rows": 4,
        "shard_mb": 1,
    }
    execute(Settings.check(**(given | changes)), LocalWorker)
    return base / "out"
