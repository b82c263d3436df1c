"""docs/faq.md: what it states of settings, sizes, copies and reuse, tried on real runs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import datasets
import pytest
import torch
from run_files import settings_of
from safetensors.torch import save
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.errors import PipelineError
from pipeline.execute import LocalWorker, execute
from pipeline.inspect_run import inspect_run
from pipeline.loading import FeatureDataset, FeatureStream
from pipeline.settings import NOT_IN_FINGERPRINT, Settings
from pipeline.validate import validate

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "faq.md").read_text()


def answer(question: str) -> str:
    """The text below a question."""
    (found,) = [part for part in PAGE.split("\n### ") if part.startswith(question)]
    return found


def test_settings_that_may_change_are_those_outside_the_fingerprint() -> None:
    text = answer("Why is resume refused?").split("These may change", 1)[1].split(".", 1)[0]
    named = {name.replace("-", "_") for name in re.findall(r"`--([a-z-]+)`", text)}
    assert named == NOT_IN_FINGERPRINT


def test_the_refusal_reads_as_the_page_says(tiny_run: Path) -> None:
    with pytest.raises(PipelineError) as refused:
        execute(settings_of(tiny_run, temperature=0.5), LocalWorker)
    said = f"error: {refused.value}".replace(str(tiny_run), "/data/run")
    assert said in answer("Why is resume refused?")


def test_other_prompts_are_refused_by_their_digest(tiny_run: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    (old,) = settings_of(tiny_run).prompts
    prompts.write_text(Path(old).read_text() + '{"prompt": "one more"}\n')
    with pytest.raises(PipelineError, match="prompts_sha256: there"):
        execute(settings_of(tiny_run, prompts=str(prompts)), LocalWorker)


def test_sizes_as_shard_safetensors_and_pickle(nano_run: Path) -> None:
    rows = list(FeatureDataset(nano_run))
    tokens = sum(row["num_tokens"] for row in rows)
    tensors = [{k: v for k, v in row.items() if isinstance(v, torch.Tensor)} for row in rows]
    pickled = 0
    for row in rows:
        file = BytesIO()
        torch.save(row, file)
        pickled += len(file.getvalue())
    found = inspect_run(nano_run)
    sizes = (found.disk_bytes, sum(len(save(row)) for row in tensors), pickled)
    text = " ".join(answer("Why Parquet").split())
    told = re.search(
        r"about (\d+) tokens\): ([\d,]+) bytes .* ([\d,]+) as one .* ([\d,]+) by `torch", text
    )
    # Which token is likeliest in bfloat16 depends on the processor's kernels: 790 here, 802 there.
    assert told and int(told[1]) == pytest.approx(tokens, rel=0.04)
    for group, size in zip(told.groups()[1:], sizes, strict=True):
        assert int(group.replace(",", "")) == pytest.approx(size / tokens, rel=0.02)
    ratios = [c.logical_bytes / c.disk_bytes for c in found.columns if c.dtype == "bfloat16"]
    least, most = re.findall(r"1/([\d.]+\d)", answer("Why are bfloat16"))
    assert (float(least), float(most)) == pytest.approx((min(ratios), max(ratios)), rel=0.02)


def test_a_partial_copy_trains_and_validates_only_when_asked_to(
    tiny_run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_run, copy)
    gone = sorted((copy / "data").iterdir())[1]
    gone.unlink()
    names = {row["sample_id"] for row in FeatureStream(copy, allow_missing=True)}
    assert 0 < len(names) < 7
    with pytest.raises(PipelineError, match=f"{gone.name} is missing"):
        FeatureStream(copy)
    with pytest.raises(FileNotFoundError, match=gone.name):
        datasets.load_dataset(str(copy), split="train", cache_dir=str(tmp_path / "cache"))
    assert validate(copy, allow_missing=True).ok and not validate(copy).ok


def test_a_finished_run_gets_other_features_without_decoding_again(
    tiny_run: Path, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """The page's own code and options, here without Ray."""
    text = answer("Can I add a feature set")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    (tmp_path / "OUT").symlink_to(tiny_run)
    env = {**os.environ, "HF_HOME": str(tmp_path / "hf")}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["python", "jobs/extract_mtp.py"]
    told = dict(zip(words[2::2], words[3::2], strict=True))
    values = {name.lstrip("-").replace("-", "_"): value for name, value in told.items()}
    before = settings_of(tiny_run)
    values |= {
        "target": str(tiny_llama_dir),
        "prompts": str(tmp_path / values["prompts"]),
        "out": str(tmp_path / "out"),
        "layers": [values["layers"]],
        "seed": before.seed,
    }
    manifest = execute(Settings.check(**values), LocalWorker)
    assert manifest["generated_by"] is None and manifest["rejected"] == {}
    first = {row["sample_id"]: row for row in FeatureDataset(tiny_run)}
    again = {row["sample_id"]: row for row in FeatureDataset(tmp_path / "out")}
    assert first.keys() == again.keys()
    for name, row in again.items():
        assert (row["on_policy"], row["finish_reason"]) == (0, "given")
        assert row["position_offset"] == first[name]["position_offset"]
        for column in ("input_ids", "loss_mask", "target_mask"):
            assert torch.equal(row[column], first[name][column])
        new, old = row["final_hidden"].float(), first[name]["final_hidden"].float()
        assert float((new - old).norm() / old.norm()) < 2**-8  # bfloat16, in other micro-batches
        assert {"block_0_hidden", "block_1_hidden"} <= row.keys()


def test_prompts_tells_beforehand_what_a_run_rejects(tiny_run: Path, tiny_llama_dir: Path) -> None:
    (prompts,) = settings_of(tiny_run).prompts
    words = ["prompts", prompts, "--target", str(tiny_llama_dir), "--show", "2"]
    told = CliRunner().invoke(app, words, env={"COLUMNS": "200"}).output
    assert "9 rows = 7 accepted + 2 rejected" in told
