"""Conversations to token ids, without ever tokenising generated text again.

The chat template is rendered with a placeholder where each answer goes and cut there. The fixed
texts between answers (segments) are tokenised one by one; answers stay the ids they are.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jinja2
import numpy as np
import numpy.typing as npt

from pipeline.chat_encoding import Int32Array, TextEncoder
from pipeline.chat_layout import (
    Layout,
    check_tools_printed,
    interleave,
    lay_out,
    with_marked_answers,
)
from pipeline.errors import PipelineError, RowReject
from pipeline.prompt_turns import Message, Thinking
from pipeline.template_process import RENDERER, TemplateLimit

UInt8Array = npt.NDArray[np.uint8]
Tools = Sequence[dict[str, Any]]
PROBE = "Hello"


class GivenRow(NamedTuple):
    """ids: int32 [T]; loss_mask: uint8 [T], 1 on answers and their end-of-turn tokens."""

    ids: Int32Array
    loss_mask: UInt8Array


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template, in jinja2's immutable sandbox, in a
    process with limits (template_process.py).

    Attributes:
        template: the template's source, for the run's fingerprint.
        eos_ids: every id that ends an answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | None = None,
        template_args: Mapping[str, Any] | None = None,
        eos_ids: Collection[int] = (),
        control_tokens: Literal["reject", "text"] = "reject",
        thinking: Thinking = "keep",
    ) -> None:
        """
        tokenizer: a transformers.PreTrainedTokenizerFast.
        template: a chat template to use in place of the tokenizer's own.
        template_args: further names the template reads (enable_thinking, date_string, …).
        eos_ids: the target model's end ids, besides the tokenizer's `eos_token_id`.
        control_tokens: what becomes of a control token's name in the text of a turn: the row is
            rejected, or it stays text, as pieces that are no control token.
        thinking: with "template" the template may leave out the thoughts of turns.

        Raises PipelineError: no template, one that does not compile, breaks out of the sandbox,
        reads the clock, prints two BOS or ends answers with a token that is no end id; a
        tokenizer that adds a space before each text.
        """
        self._tokenizer = tokenizer
        try:
            self.template: str = tokenizer.get_chat_template(template)
        except ValueError:
            raise PipelineError(
                "The tokenizer has no chat template (or several and no default); name the file "
                "of the one that the target model was trained with: --chat-template FILE"
            ) from None
        own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self.eos_ids = frozenset(eos_ids) | frozenset(own)
        # A template that prints today's date would give another prompt tomorrow, and a resumed
        # run other rows than its first half. A name that cannot be called stands in its way.
        self._args = {"strftime_now": None, **(template_args or {})}
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        control_ids = frozenset(
            i for i, token in added.items() if token.special or self._is_markup(token.content)
        ).union(self.eos_ids)
        self._encoder = TextEncoder(tokenizer, control_ids, control_tokens)
        self._thoughts_may_go = thinking == "template"
        # What the template prints before the first text and between a question and its answer,
        # for prompts that come rendered; unknown where it refuses this one conversation.
        self.opening, self.header = "", ""
        self._try_out()

    def _is_markup(self, token: str) -> bool:
        """Whether an ordinary added token is part of the template's markup, such as <think>.

        Others are plain vocabulary (Gemma adds line breaks and HTML tags) and may be typed.
        """
        return token.startswith(("<", "[")) and token in self.template

    def _try_out(self) -> None:
        """Raise on the first use what would otherwise be raised on every row."""
        try:
            text = self._render([Message("user", PROBE)], generate=True)
        except RowReject as reject:
            # A template may well refuse this one conversation, but not for these reasons.
            if reject.reason == "template_limit":
                raise PipelineError(f"{reject.detail}; do not use this file") from None
            if "strftime_now" in self.template and "not callable" in reject.detail:
                raise PipelineError(
                    "The chat template prints today's date, so a run could not be repeated; "
                    "fix the date through template_args (Llama: date_string='26 Jul 2024')"
                ) from None
        else:
            self.opening, _, self.header = text.partition(PROBE)
        self._check_end_of_turn()
        letter = self.encode("a").tolist()
        if self.encode("b\na").tolist()[-len(letter) :] != letter:
            raise PipelineError(
                "This tokenizer puts a space before each text it is given, so a conversation "
                "cannot be tokenised piece by piece; such tokenizers are not supported"
            )

    def _check_end_of_turn(self) -> None:
        """Raise PipelineError if answers end with a control token that is not in `eos_ids`.

        Generation would run past it, and the loss mask would leave it out.
        """
        try:
            turns = [Message("user", "Hello"), Message("assistant", "Hi")]
            following = self.encode(self._lay_out(turns, (), generate=False).segments[1]).tolist()
        except RowReject:  # a template may refuse this one conversation
            return
        if following and following[0] in self._encoder.control_ids - self.eos_ids:
            token = self._tokenizer.convert_ids_to_tokens(following[0])
            raise PipelineError(
                f"The chat template ends answers with {token!r} (id {following[0]}), but answers "
                f"are said to end with the ids {sorted(self.eos_ids)}; add it to the end ids"
            )

    @property
    def bos_id(self) -> int | None:
        """The BOS that the template prints at the start; None if it prints none."""
        bos = self._tokenizer.bos_token
        return self._tokenizer.bos_token_id if bos and self.opening.startswith(bos) else None

    @property
    def vocab_size(self) -> int:
        """One more than the highest id of the tokenizer."""
        return len(self._tokenizer)

    def encode(self, text: str) -> Int32Array:
        """Token ids of a text, int32 [n]; special tokens in it count, none are added."""
        return self._encoder.encode(text)

    def prompt_segments(self, messages: Sequence[Message], tools: Tools = ()) -> list[str]:
        """The fixed texts before each answer, one for each question; given answers are dropped.

        A question is a user turn, or a tool's result that no further call follows. Segment 0 runs
        through the generation header of the first; segment i from the end of answer i-1's content,
        so it starts with the end-of-turn text, through the next generation header.

        Raises RowReject: template_refused, template_drops_text, history_changes, control_token.
        """
        history = self._shielded(_up_to_last_question(messages))
        tools = self._encoder.shielded(list(tools))
        self._check_control([turn for turn in history if not turn.is_answer], tools)
        history = with_marked_answers(history)
        marks = [message.content for message in history if message.is_answer]
        segments = self._lay_out(history, tools, generate=True).segments
        ends = [index for index, message in enumerate(history) if message.is_answer]
        for count, end in enumerate(ends):
            shorter = self._render(history[:end], tools, generate=True)
            if shorter != interleave(segments[: count + 1], marks[:count]):
                detail = f"the first {end} turns are printed differently when turns follow"
                raise RowReject("history_changes", detail)
        return segments

    def last_prompt(self, messages: Sequence[Message], tools: Tools = ()) -> Layout:
        """What precedes the answer to the last question: n segments, n-1 given answers.

        Raises RowReject: template_refused, template_drops_text, control_token.
        """
        history = self._shielded(_up_to_last_question(messages))
        tools = self._encoder.shielded(list(tools))
        self._check_control(history, tools)
        return self._lay_out(history, tools, generate=True)

    def given_row(self, messages: Sequence[Message], tools: Tools = ()) -> GivenRow:
        """A whole conversation as it is given, with the loss on its answers.

        ids decode to the template's rendering of the conversation. loss_mask is 1 on each answer,
        its thought included, and on the end-of-turn token (one of `eos_ids`) right after it, 0
        elsewhere: an empty thought that the template puts before an answer is template text, and
        turns that call tools are context.

        Raises RowReject: no_assistant_turn, answers_touch, template_refused,
        template_drops_text, history_changes, control_token.
        """
        if not any(message.is_answer for message in messages):
            raise RowReject("no_assistant_turn", "nothing was answered in this conversation")
        messages, tools = self._shielded(messages), self._encoder.shielded(list(tools))
        self._check_control(messages, tools)
        return self._join(*self._lay_out(messages, tools, generate=False))

    def _shielded(self, messages: Sequence[Message]) -> list[Message]:
        return [self._encoder.shielded(message) for message in messages]

    def _check_control(self, messages: Sequence[Message], tools: Tools) -> None:
        for message in messages:
            self._encoder.check(message, f"a {message.role} turn")
        for tool in tools:
            self._encoder.check(tool, "a tool")

    def _join(self, segments: Sequence[str], answers: Sequence[str]) -> GivenRow:
        pieces = [self.encode(segments[0])]
        masks = [np.zeros(len(pieces[0]), dtype=np.uint8)]
        for index, (answer, segment) in enumerate(zip(answers, segments[1:], strict=True)):
            answer_ids, fixed_ids = self.encode(answer), self.encode(segment)
            fixed_mask = np.zeros(len(fixed_ids), dtype=np.uint8)
            if len(fixed_ids) and int(fixed_ids[0]) in self.eos_ids:
                fixed_mask[0] = 1
            if index + 1 < len(answers) and (len(fixed_mask) == 0 or fixed_mask.all()):
                raise RowReject("answers_touch", f"no template text after answer {index}")
            pieces += [answer_ids, fixed_ids]
            masks += [np.ones(len(answer_ids), dtype=np.uint8), fixed_mask]
        return GivenRow(np.concatenate(pieces), np.concatenate(masks))

    def _render(self, messages: Sequence[Message], tools: Tools = (), *, generate: bool) -> str:
        """The template's text. Raises RowReject template_refused; PipelineError if hostile."""
        chat = [message.for_template() for message in messages]
        called: dict[str, Any] = {"tools": list(tools)} if tools else {}
        try:
            text = RENDERER.render(
                self.template,
                chat,
                add_generation_prompt=generate,
                names={**self._tokenizer.special_tokens_map, **self._args, **called},
            )
        except jinja2.TemplateSyntaxError as error:
            raise PipelineError(
                f"The chat template does not compile (line {error.lineno}): {error.message}"
            ) from None
        except jinja2.exceptions.SecurityError as error:
            raise PipelineError(
                f"The chat template tries to leave its sandbox ({error}); do not use this file"
            ) from None
        except TemplateLimit as error:
            raise RowReject(
                "template_limit", f"rendering the chat template takes {error}"
            ) from None
        except RuntimeError as error:
            raise RowReject("template_refused", str(error)) from None
        bos = self._tokenizer.bos_token
        if bos and text.startswith(bos + bos):
            raise PipelineError(
                f"The chat template prints {bos!r} twice at the start; remove one from it"
            )
        return text

    def _lay_out(self, messages: Sequence[Message], tools: Tools, *, generate: bool) -> Layout:
        if tools or any(message.tool_calls for message in messages):
            check_tools_printed(messages, tools, partial(self._render, generate=generate))
        return lay_out(
            messages,
            partial(self._render, tools=tools, generate=generate),
            partial(self._render, tools=tools, generate=True),
            thoughts_may_go=self._thoughts_may_go,
        )


def _up_to_last_question(messages: Sequence[Message]) -> list[Message]:
    asking = [index for index, message in enumerate(messages) if message.is_asking]
    if not asking:
        raise ValueError("a conversation needs a user turn; prompts.py rejects others")
    return list(messages[: asking[-1] + 1])
