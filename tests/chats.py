"""Renderers of the test templates over a tokenizer of bytes, and what they print."""

from typing import Any

import templates
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.chat import ChatRenderer
from pipeline.prompt_turns import Message


def byte_tokenizer(template: str | None, eos: str = "<eos>", **special: str) -> Any:
    """One token a byte, and the control tokens of all test templates."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(templates.SPECIAL_TOKENS)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>"), AddedToken("<table>")])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token=eos, **special
    )
    made.chat_template = template
    return made


def renderer_for(name: str, **kwargs: Any) -> ChatRenderer:
    tokenizer = byte_tokenizer(templates.ALL[name])
    end = tokenizer.convert_tokens_to_ids(templates.END_OF_TURN[name])
    return ChatRenderer(tokenizer, eos_ids=[end], **kwargs)


def text_of(renderer: ChatRenderer, ids: Any) -> str:
    text: str = renderer._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text


def rendering(renderer: ChatRenderer, messages: list[Message], **kwargs: Any) -> Any:
    chat = [message.for_template() for message in messages]
    return renderer._tokenizer.apply_chat_template(chat, return_dict=False, **kwargs)


def chat(*texts: str, system: str | None = None) -> list[Message]:
    roles = ["user", "assistant"] * len(texts)
    turns = [Message(*turn) for turn in zip(roles, texts, strict=False)]
    return ([] if system is None else [Message("system", system)]) + turns
