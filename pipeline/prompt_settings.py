"""The settings that decide what becomes of prompts: of a run, and of `pipeline prompts`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Self

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from pipeline.errors import PipelineError
from pipeline.prompt_turns import Thinking, Turns

if TYPE_CHECKING:
    from pipeline.prompts import PromptRow, RejectedRow


class PromptSettings(BaseModel):
    """All of them; field descriptions are the help texts of the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = Field(
        description="Target model: a Hugging Face directory, a .gguf file, gemma4-nano or "
        "smollm2-135m."
    )
    prompts: list[str] = Field(
        description="Prompts: JSONL, JSON or Parquet file (.gz, .zst too), folder of them, - for "
        "standard input, dataset directory or name. Several times: FILE=TAG or FILE=TAG:WEIGHT."
    )
    columns: str | None = Field(
        None, description="Names of the prompts' columns for ours: prompt=question,id=uid."
    )
    limit: int | None = Field(
        None, ge=1, description="Read at most this many prompts, after shuffling."
    )
    shuffle: int | None = Field(
        None, ge=0, lt=2**63, description="Seed of a random order of the prompts."
    )
    dedup: bool = Field(False, description="Reject prompts that ask the same as an earlier one.")
    turns: Turns = Field(
        "all",
        description="Assistant turns the target model answers anew: all, only the last, or none "
        "(given: the input's own answers, on_policy 0).",
    )
    thinking: Thinking = Field(
        "keep",
        description="Thoughts in the input's answers: keep them where they are, drop them, or give "
        "them to the chat template apart, to print or not.",
    )
    template_arg: list[str] = Field(
        [],
        description="A name the chat template reads, with its JSON value: enable_thinking=false. "
        "Once for each.",
    )
    tokenizer: str | None = Field(
        None, description="Directory of a Hugging Face tokenizer to use in place of the target's."
    )
    chat_template: str | None = Field(
        None, description="Jinja file to use in place of the target's own chat template."
    )
    control_tokens: Literal["reject", "text"] = Field(
        "reject",
        description="A control token's name in a prompt: reject the row, or let it stay text.",
    )
    max_length: int = Field(
        16384, ge=2, description="Longest row, prompt plus answers, within the target's context."
    )
    trust_remote_code: bool = Field(
        False, description="Run the Python code that a Hugging Face directory brings along."
    )

    @pydantic.field_validator("prompts", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @classmethod
    def check(cls, **values: Any) -> Self:
        """Build settings; raises PipelineError that names the first bad option."""
        try:
            return cls(**values)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            option = "--" + str(first["loc"][0]).replace("_", "-")
            raise PipelineError(f"{option}: {first['msg']} (got {first['input']!r})") from error

    def read(self) -> "Iterator[PromptRow | RejectedRow]":
        """The prompts in the order of the run. Raises PipelineError."""
        from pipeline.prompts import read_prompts  # pyarrow, which the command line needs not

        return read_prompts(
            self.prompts,
            limit=self.limit,
            columns=self.columns,
            shuffle=self.shuffle,
            dedup=self.turns if self.dedup else None,
            thinking=self.thinking,
        )
