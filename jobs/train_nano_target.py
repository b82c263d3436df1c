"""Train gemma4-nano, the small Gemma-4 that ships with the package; two CPU cores, no Ray.

python jobs/train_nano_target.py --out DIR   trains (36 minutes, cores shared), prints its numbers
python jobs/train_nano_target.py --eval      reproduces the numbers of the shipped model's card
"""

import ctypes
import json
import platform
import shutil
import sys
import sysconfig
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

ROOT = str(Path(__file__).resolve().parent.parent)  # of the packages `pipeline` and `jobs`
sys.path.insert(0, ROOT)

import numpy as np
import torch
import typer

from jobs.nano_card import evaluate, model_card
from jobs.nano_corpus import Chat, chats_of, library_modules, read_source
from jobs.nano_training import LONGEST_ROW, ChatEncoder, learn_vocabulary, new_model, train
from pipeline.chat import ChatRenderer
from pipeline.errors import PipelineError, exit_on_error
from pipeline.models.load import find_target, load_tokenizer
from pipeline.models.nano import HELD_OUT_NAME, NANO_FOLDER, nano_config
from pipeline.models.tiny import exact_in_both, write_hf
from pipeline.models.tiny_tokenizer import EOS_IDS, write_hf_tokenizer

STEPS = 1600
HELD_OUT_ROWS = 200

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path | None, typer.Option(help="Directory to write; must be new.")] = None,
    evaluate_only: Annotated[
        bool, typer.Option("--eval", help="Measure a finished model (the shipped one).")
    ] = False,
    model: Annotated[Path, typer.Option(help="With --eval: the model's directory.")] = NANO_FOLDER,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = STEPS,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and batch order.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; they change last bits.")] = 2,
) -> None:
    """Train gemma4-nano from the installed Python's standard library, or measure it."""
    with exit_on_error():
        torch.set_num_threads(threads)
        if evaluate_only:
            print(evaluate(model))
            return
        if out is None or out.exists():
            raise PipelineError(f"--out {out}: name a directory that does not exist yet")
        _train_into(out, steps=steps, seed=seed)


def _train_into(out: Path, *, steps: int, seed: int) -> None:
    _keep_freed_memory()
    torch.use_deterministic_algorithms(True)
    # Slow, and nothing reads it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    warnings.simplefilter("ignore", SyntaxWarning)  # of the library's own sources
    started = time.monotonic()
    modules = library_modules()
    training = [module for module in modules if not module.held_out]
    vocabulary = learn_vocabulary([read_source(module) for module in training])
    out.mkdir(parents=True)
    config = nano_config()
    config.save_pretrained(out)
    write_hf_tokenizer(out, vocabulary)
    renderer = ChatRenderer(load_tokenizer(find_target(str(out))), eos_ids=EOS_IDS)
    encode = ChatEncoder(renderer)
    rows = [encode(chat.user, chat.model) for module in training for chat in chats_of(module)]
    rows = [row for row in rows if len(row.ids) <= LONGEST_ROW]
    tokens = sum(len(row.ids) for row in rows)
    answer_tokens = sum(int(row.loss_mask.sum()) for row in rows)
    model = new_model(config, seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{len(training)} modules, {len(rows):,} chats, {tokens:,} tokens "
        f"({answer_tokens:,} of answers); {parameters:,} parameters",
        flush=True,
    )
    train(model, rows, steps=steps, seed=seed)
    minutes = (time.monotonic() - started) / 60
    weights = {name: exact_in_both(tensor) for name, tensor in _own_weights(model)}
    write_hf(out, config, vocabulary, weights)
    _write_held_out(out, encode)
    # The model was trained on the library's text, and held-out.jsonl quotes it.
    shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt", out / "PSF-LICENSE.txt")
    numbers = evaluate(out)
    print(numbers)
    recipe = {
        "python": platform.python_version(),
        "modules": len(training),
        "held_out_modules": len(modules) - len(training),
        "chats": len(rows),
        "tokens": tokens,
        "answer_tokens": answer_tokens,
        "parameters": parameters,
        "steps": steps,
        "seed": seed,
        "threads": torch.get_num_threads(),
        "minutes": round(minutes),
    }
    (out / "README.md").write_text(model_card(recipe, numbers), encoding="utf-8")


def _own_weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Every weight under transformers' name; lm_head is the embedding again."""
    return [item for item in model.state_dict().items() if item[0] != "lm_head.weight"]


def _write_held_out(out: Path, encode: ChatEncoder) -> None:
    """Chats of the held-out modules, evenly spread, as prompts the pipeline reads."""
    chats: list[Chat] = []
    for module in library_modules():
        if module.held_out:
            chats += [
                chat
                for chat in chats_of(module)
                if len(encode(chat.user, chat.model).ids) <= LONGEST_ROW
            ]
    picked = np.linspace(0, len(chats) - 1, HELD_OUT_ROWS).round().astype(int)
    lines = []
    for chat in (chats[index] for index in picked):
        turns = [("user", chat.user), ("assistant", chat.model)]
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"id": f"{chat.module}-{chat.line}", "messages": messages}))
    (out / HELD_OUT_NAME).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _keep_freed_memory() -> None:
    """Have glibc keep freed tensors' pages: asking for them anew costs a tenth of the time."""
    if platform.libc_ver()[0] == "glibc":
        m_mmap_max, m_trim_threshold = -4, -1
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


if __name__ == "__main__":
    app()
