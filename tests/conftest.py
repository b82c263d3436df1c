"""What several test files share: a tiny random Llama on disk, and one finished run of it."""

import json
import os
import sys
from pathlib import Path

import pytest

# jobs/ is not installed with the package.
sys.path.insert(0, str(Path(__file__).parent.parent))
# Tests run side by side on few cores; these are read when torch and the tokenizers start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# ChatML over a byte-level tokenizer: the 256 byte symbols, then these.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTEXT_LENGTH = 1024


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: Llama, 2 layers, hidden 32, 2 KV heads of 8, 259 byte tokens."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("tiny_llama")
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
    return path


@pytest.fixture(scope="session")
def tiny_run(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run: 9 rows in, 2 rejected; 2 rollout parts, 2 shards.

    Read-only: copy it before changing anything.
    """
    from pipeline.execute import LocalWorker, execute
    from pipeline.settings import Settings

    base = tmp_path_factory.mktemp("tiny_run")
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
    settings = Settings.check(
        target=str(tiny_llama_dir),
        prompts=str(prompts),
        out=str(base / "out"),
        max_new_tokens=96,
        temperature=1.0,
        seed=7,
        rollout_rows=4,
        shard_mb=1,
    )
    execute(settings, LocalWorker)
    return base / "out"
