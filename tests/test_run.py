"""A whole run in one process: what the folder holds, and that nothing depends on chance."""

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars
import pyarrow.parquet as pq
import pytest
import torch
from datasets import load_dataset
from rich.console import Console
from run_files import data_files, geometry_of_files, load, settings_of, shard_rows
from tokenizers.pre_tokenizers import ByteLevel

from pipeline.batches import micro_batches
from pipeline.errors import IncompleteError, PipelineError
from pipeline.execute import LocalWorker, dry_run, execute
from pipeline.forecast import print_forecast
from pipeline.manifest import RunFolder, make_commit
from pipeline.models.base import PositionedRow
from pipeline.models.load import find_target, load_eos_ids, load_geometry
from pipeline.progress import RunProgress
from pipeline.run import Run
from pipeline.seeds import row_seed
from pipeline.settings import Settings
from pipeline.worker import Worker

ROOT = Path(__file__).parent.parent


def test_rows_in_are_rows_out_plus_rejects(tiny_run: Path) -> None:
    manifest = json.loads((tiny_run / "manifest.json").read_text())
    assert (manifest["rows_in"], manifest["rows_out"], manifest["complete"]) == (9, 7, True)
    assert manifest["rejected"] == {"bad_json": 1, "empty_conversation": 1}
    rejects = [json.loads(line) for line in (tiny_run / "rejects.jsonl").read_text().splitlines()]
    assert [(r["source"], r["reason"]) for r in rejects] == [
        ("prompts.jsonl:8", "empty_conversation"),
        ("prompts.jsonl:9", "bad_json"),
    ]
    assert len(manifest["shards"]) == 2 and len(manifest["rollouts"]) == 2
    assert [row["sample_id"] for row in shard_rows(tiny_run)] == [
        *(f"row-{i}" for i in range(6)),
        "turns",
    ]
    assert not list((tiny_run / ".staging").iterdir())


def test_every_stored_row_is_a_plain_pass_of_its_ids_at_its_offset(tiny_run: Path) -> None:
    settings = settings_of(tiny_run)
    files = find_target(settings.target)
    target = load(files, dtype="bfloat16")
    offsets = set()
    for row in shard_rows(tiny_run):
        offsets.add(row["position_offset"])
        ids = torch.tensor(row["input_ids"], dtype=torch.long)[None]
        positions = row["position_offset"] + torch.arange(ids.shape[1])[None]
        with torch.inference_mode():
            out = target.model(  # type: ignore[attr-defined]
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=positions,
                output_hidden_states=True,
                use_cache=False,
            )
        expected = out.hidden_states[-1][0].float().numpy()
        error = np.linalg.norm(row["final_hidden"] - expected) / np.linalg.norm(expected)
        assert error < 2e-2  # bfloat16, padded against alone
        again = target.forward(
            [PositionedRow(row["input_ids"], row["position_offset"])], top_k=settings.topk
        )[0]
        key, value = again.shared_kv["full"]
        for stored, tensor in ((row["full_key"], key), (row["full_value"], value)):
            wanted = tensor.float().numpy()
            assert np.linalg.norm(stored - wanted) / np.linalg.norm(wanted) < 2e-2
        assert row["position_offset"] + row["num_tokens"] <= 1024
    assert len(offsets) == 7


def test_a_second_run_gives_the_same_bytes(tiny_run: Path, tmp_path: Path) -> None:
    execute(settings_of(tiny_run, out=str(tmp_path / "out")), LocalWorker)
    assert data_files(tmp_path / "out") == data_files(tiny_run)


def test_the_seed_changes_answers_and_offsets(tiny_run: Path, tmp_path: Path) -> None:
    execute(settings_of(tiny_run, out=str(tmp_path / "out"), seed=8), LocalWorker)
    before, after = shard_rows(tiny_run), shard_rows(tmp_path / "out")
    assert [r["sample_id"] for r in before] == [r["sample_id"] for r in after]
    assert all(
        a["position_offset"] != b["position_offset"] for a, b in zip(before, after, strict=True)
    )
    assert any(
        a["input_ids"].tolist() != b["input_ids"].tolist()
        for a, b in zip(before, after, strict=True)
    )


def test_turns_last_and_given(tiny_run: Path, tmp_path: Path) -> None:
    """The two-turn row: which of its answers are the target model's, and which the input's."""
    kept = {}
    for turns in ("all", "last", "given"):
        prompts = tmp_path / f"{turns}.jsonl"
        chat = [
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "Given answer"},
            {"role": "user", "content": "Two"},
            {"role": "assistant", "content": "Second"},
        ]
        prompts.write_text(json.dumps({"id": "t", "messages": chat}) + "\n")
        out = tmp_path / turns
        changes = {"out": str(out), "turns": turns, "prompts": str(prompts)}
        execute(settings_of(tiny_run, **changes), LocalWorker)
        kept[turns] = shard_rows(out)[0]
    text = {
        turns: text_bytes(row["input_ids"][row["loss_mask"] == 1]) for turns, row in kept.items()
    }
    assert text["given"] == b"Given answerSecond"
    assert (kept["given"]["on_policy"], kept["given"]["finish_reason"]) == (0, "given")
    assert [kept[t]["on_policy"] for t in ("all", "last")] == [1, 1]
    whole = text_bytes(kept["last"]["input_ids"])
    assert b"assistant\nGiven answer\nuser\nTwo" in whole  # context, but not supervised
    assert b"Given answer" not in text["last"] and b"Given answer" not in text["all"]


def text_bytes(ids: Any) -> bytes:
    """The bytes that ids of the tiny byte-level tokenizer stand for, special ones left out."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    table = {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}
    symbols = sorted(ByteLevel.alphabet())
    return bytes(table[symbols[i]] for i in ids if i < 256)


def test_plain_load_dataset_reads_exactly_the_committed_rows(
    tiny_run: Path, tmp_path: Path
) -> None:
    """With decoys around: a leftover, a stray shard, a file that would be its own split."""
    out = shutil.copytree(tiny_run, tmp_path / "latest-test")
    shard = next((out / "data").iterdir())
    shutil.copy(shard, out / "data" / "test-latest.parquet")
    shutil.copy(shard, out / ".staging" / "train-00009.parquet")
    shutil.copy(shard, out / "data" / "x.parquet.tmp")
    rows = shard_rows(out)
    for streaming in (False, True):
        loaded = load_dataset(str(out), streaming=streaming, cache_dir=str(tmp_path / "cache"))
        assert list(loaded) == ["train"]
        data = list(loaded["train"].with_format("torch"))
        assert [r["sample_id"] for r in data] == [r["sample_id"] for r in rows]
        for got, row in zip(data, rows, strict=True):
            for name in ("final_hidden", "full_key", "full_value", "teacher_top_logprobs"):
                assert got[name].dtype == torch.float32
                assert torch.equal(got[name], torch.from_numpy(row[name].copy()))
            for name in ("input_ids", "target_ids", "loss_mask"):
                assert got[name].tolist() == row[name].tolist()
    chats = load_dataset(str(out), "rollouts", split="train", cache_dir=str(tmp_path / "cache"))
    assert chats["sample_id"][:] == [r["sample_id"] for r in rows]
    columns = load_dataset(str(out), split="train", columns=["sample_id"], streaming=True)
    assert [set(r) for r in columns] == [{"sample_id"}] * len(rows)  # E15


def test_other_readers_see_the_same_ids(tiny_run: Path) -> None:
    rows = shard_rows(tiny_run)
    expected = [row["input_ids"].tolist() for row in rows]
    pattern = str(tiny_run / "data" / "*.parquet")
    found = duckdb.sql(
        f"select input_ids from read_parquet('{pattern}') order by filename"
    ).fetchall()
    assert [r[0] for r in found] == expected
    assert polars.read_parquet(pattern, columns=["input_ids"])["input_ids"].to_list() == expected


def test_resume_skips_what_is_committed_and_redoes_what_is_broken(
    tiny_run: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(tiny_run, tmp_path / "out")
    (cut,) = (out / "data").glob("train-00000-*")
    cut.write_bytes(cut.read_bytes()[:-1])
    next((out / "rollouts").glob("part-00001-*")).unlink()
    (out / "data" / "stray.parquet").write_bytes(b"x")
    (out / ".staging" / "train-00001.abc.parquet").write_bytes(b"x")
    executed: list[str] = []

    def counting(run: Run) -> Any:
        worker = Worker(run.spec, "cpu")

        def executor(tasks: Any) -> Any:
            for task in tasks:
                executed.append(task.name)
                yield worker.execute(task)

        return executor

    execute(settings_of(out), counting)
    assert executed == ["rollout-00001", "train-00000"]
    assert data_files(out) == data_files(tiny_run)
    executed.clear()
    execute(settings_of(out), counting)
    assert executed == []


def test_another_run_in_the_same_folder_is_refused_naming_what_differs(
    tiny_run: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(tiny_run, tmp_path / "out")
    with pytest.raises(PipelineError) as error:
        execute(settings_of(out, seed=8, max_new_tokens=5), LocalWorker)
    assert "settings.seed: there 7, now 8" in str(error.value)
    assert "settings.max_new_tokens: there 96, now 5" in str(error.value)
    prompts = tmp_path / "edited.jsonl"
    original = Path(settings_of(out).prompts[0]).read_text()
    prompts.write_text(original.replace("Why?", "Why!"))
    with pytest.raises(PipelineError, match="prompts_sha256: there"):
        execute(settings_of(out, prompts=str(prompts)), LocalWorker)
    assert data_files(out) == data_files(tiny_run)


def test_a_folder_with_other_things_is_left_alone(tiny_run: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(PipelineError, match=r"not empty \(thesis.tex\)"):
        execute(settings_of(tiny_run, out=str(tmp_path)), LocalWorker)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_runs_in_one_folder_exclude_each_other(tiny_run: Path, tmp_path: Path) -> None:
    out = shutil.copytree(tiny_run, tmp_path / "out")
    with (
        RunFolder(out).locked(),
        pytest.raises(PipelineError, match=r"another run is writing here \(process \d+ on "),
    ):
        execute(settings_of(out), LocalWorker)
    execute(settings_of(out), LocalWorker)  # the lock went with its holder


def test_a_late_worker_can_neither_replace_nor_add(tiny_run: Path, tmp_path: Path) -> None:
    """Two workers finish the same shard with other bytes: the first record counts."""
    out = shutil.copytree(tiny_run, tmp_path / "out")
    folder = RunFolder(out)
    first = folder.read_commits()["train-00000"]
    staged = folder.stage("train-00000")
    table = pq.read_table(out / first.file)
    pq.write_table(table.slice(1), staged)
    fields = first.model_dump(exclude={"file", "bytes", "sha256"})
    late = make_commit(staged, folder="data", stem="train-00000-of-00002", **fields)
    assert late.file != first.file
    assert folder.publish(staged, late) == first
    assert data_files(out) == data_files(tiny_run)
    assert folder.read_commits()["train-00000"] == first


@pytest.mark.parametrize(
    "file", ["../x.parquet", "/etc/x.parquet", "data/../x.parquet", "data/a/b.parquet", "data/x"]
)
def test_a_record_that_points_outside_is_refused(file: str, tiny_run: Path, tmp_path: Path) -> None:
    out = shutil.copytree(tiny_run, tmp_path / "out")
    record = next((out / "commits").glob("train-*.json"))
    fields = json.loads(record.read_text())
    record.write_text(json.dumps({**fields, "file": file}))
    with pytest.raises(PipelineError, match="not a commit record"):
        RunFolder(out).read_commits()


def test_a_shift_for_length_dependent_rope_is_refused(
    tiny_run: Path, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    target = shutil.copytree(tiny_llama_dir, tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    (target / "config.json").write_text(json.dumps(config))
    changes = {"target": str(target), "out": str(tmp_path / "out")}
    with pytest.raises(PipelineError, match="pass --position-shift-max 0"):
        execute(settings_of(tiny_run, **changes), LocalWorker)
    execute(settings_of(tiny_run, **changes, position_shift_max=0), LocalWorker)
    assert {row["position_offset"] for row in shard_rows(tmp_path / "out")} == {0}


@pytest.mark.parametrize("trouble", ["missing", "unexpected", "misshapen"])
def test_a_tensor_that_does_not_fit_stops_the_load(
    trouble: str, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    target = shutil.copytree(tiny_llama_dir, tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if trouble == "missing":
        del tensors[name]
    elif trouble == "unexpected":
        name = "model.layers.7.extra"
        tensors[name] = torch.zeros(2)
    else:
        tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    files = find_target(str(target))
    with pytest.raises(PipelineError, match=name):
        load(files)


def test_pickled_weights_are_not_read(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """G5: a .bin with a side effect in it is refused, unopened."""
    target = shutil.copytree(tiny_llama_dir, tmp_path / "target")
    (target / "model.safetensors").rename(target / "pytorch_model.bin")
    with pytest.raises(PipelineError, match="pickled weights are not read"):
        load(find_target(str(target)))


def test_remote_code_stays_off(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """G6: an auto_map in the directory runs nothing."""
    target = shutil.copytree(tiny_llama_dir, tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    config["model_type"] = "stranger"
    config["auto_map"] = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    (target / "config.json").write_text(json.dumps(config))
    (target / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(PipelineError, match="cannot read its config"):
        geometry_of_files(find_target(str(target)))
    assert not (tmp_path / "ran").exists()
    # With the flag it does, and the fingerprint says so.
    trusting = find_target(str(target), trust_remote_code=True)
    with pytest.raises(PipelineError):
        load_geometry(trusting, backend="transformers", dtype="float32", kv_cache_dtype="float16")
    assert (tmp_path / "ran").exists()
    assert trusting.sha256() != find_target(str(tiny_llama_dir)).sha256()
    settings = Settings.check(target="t", prompts="p", out="o", trust_remote_code=True)
    assert settings.fingerprinted()["trust_remote_code"] is True


def test_all_eos_sources_count(tiny_llama_dir: Path, tmp_path: Path) -> None:
    from pipeline.models.load import load_tokenizer

    target = shutil.copytree(tiny_llama_dir, tmp_path / "target")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 77]}))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "eos_token_id": 66}))
    files = find_target(str(target))
    assert load_eos_ids(files, load_tokenizer(files)) == {258, 77, 66}


def test_the_targets_generation_config_does_not_override_greedy(
    tiny_run: Path, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """D5: a directory that asks for sampling answers greedily all the same."""
    target = shutil.copytree(tiny_llama_dir, tmp_path / "target")
    wish = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": 258}
    (target / "generation_config.json").write_text(json.dumps(wish))
    outs = []
    for name, path in (("plain", tiny_llama_dir), ("wishful", target)):
        out = tmp_path / name
        changes = {"target": str(path), "out": str(out), "temperature": 0.0, "max_new_tokens": 20}
        execute(settings_of(tiny_run, **changes), LocalWorker)
        outs.append([row["input_ids"].tolist() for row in shard_rows(out)])
    assert outs[0] == outs[1]
    manifest = json.loads((tmp_path / "wishful" / "manifest.json").read_text())
    assert manifest["sampling"] == {
        "max_new_tokens": 20,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "stop": [],
    }


def test_a_non_finite_row_is_rejected_and_the_rest_kept(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.models import hf

    forward = hf.TransformersTarget.forward

    def poisoned(self: Any, rows: Any, **kwargs: Any) -> Any:
        outputs = forward(self, rows, **kwargs)
        return [
            dataclasses.replace(output, final_hidden=output.final_hidden / 0)
            if b"Why?" in text_bytes(row.ids)
            else output
            for row, output in zip(rows, outputs, strict=True)
        ]

    monkeypatch.setattr(hf.TransformersTarget, "forward", poisoned)
    manifest = execute(settings_of(tiny_run, out=str(tmp_path / "out")), LocalWorker)
    assert manifest["rejected"] == {"bad_json": 1, "empty_conversation": 1, "non_finite": 1}
    assert (manifest["rows_in"], manifest["rows_out"]) == (9, 6)
    last = json.loads((tmp_path / "out" / "rejects.jsonl").read_text().splitlines()[-1])
    assert (last["sample_id"], last["reason"]) == ("row-4", "non_finite")
    assert "final_hidden" in last["detail"]


def test_micro_batches_keep_to_the_budget_and_cover_every_row_once() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 300, 200).tolist()
    batches = micro_batches(lengths, 1000)
    assert sorted(i for batch in batches for i in batch) == list(range(200))
    for batch in batches:
        assert len(batch) * max(lengths[i] for i in batch) <= 1000 or len(batch) == 1
    padded = sum(len(b) * max(lengths[i] for i in b) for b in batches)
    assert padded < 1.05 * sum(lengths)
    assert micro_batches([5000, 10], 1000) == [[0], [1]]


def test_prompts_longer_than_the_context_are_rejected_not_cut(
    tiny_run: Path, tmp_path: Path
) -> None:
    """A25, and a second turn that the first answer makes too long."""
    long = [{"role": "user", "content": "x" * 1100}]
    grows = [
        {"role": "user", "content": "x" * 900},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "y" * 60},
    ]
    prompts = tmp_path / "p.jsonl"
    rows = [("long", long), ("grows", grows), ("fine", [{"role": "user", "content": "Hi"}])]
    prompts.write_text("".join(json.dumps({"id": i, "messages": m}) + "\n" for i, m in rows))
    out = tmp_path / "out"
    manifest = execute(settings_of(tiny_run, out=str(out), prompts=str(prompts)), LocalWorker)
    rejects = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    reasons = {r["sample_id"]: r["reason"] for r in rejects}
    assert reasons["long"] == "too_long"
    kept = [row["sample_id"] for row in shard_rows(out)]
    # Whether the first answer stops in time is the model's choice; nothing may be lost either way.
    assert set(kept) | set(reasons) == {"long", "grows", "fine"}
    assert manifest["rows_in"] == 3


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "cannot load a tokenizer"),
        ("config.json", "[]", "cannot load a tokenizer"),
        ("generation_config.json", "{", r"generation_config\.json: not a JSON object"),
        ("generation_config.json", "[]", r"generation_config\.json: not a JSON object"),
        ("tokenizer.json", "{}", "cannot load a tokenizer"),
        ("model.safetensors", "", "cannot load: Error while deserializing header"),
        ("chat_template.jinja", "{% if %}", "does not compile"),
    ],
)
def test_a_broken_file_of_the_target_is_one_clear_error(
    file: str, content: str, message: str, tiny_run: Path, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    target = shutil.copytree(tiny_llama_dir, tmp_path / "target")
    (target / file).write_text(content)
    changes = {"target": str(target), "out": str(tmp_path / "out")}
    with pytest.raises(PipelineError, match=message):
        execute(settings_of(tiny_run, **changes), LocalWorker)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": 4096}, "--topk 4096: the vocabulary has only 259 tokens"),
        ({"tokenizer": "/nowhere"}, "--tokenizer /nowhere: cannot load a tokenizer"),
        ({"chat_template": "/nowhere"}, "--chat-template /nowhere: "),
        ({"backend": "llamacpp"}, r"--backend llamacpp"),
        ({"target": "nowhere"}, "--target nowhere: not a .gguf file"),
        ({"prompts": "nowhere.jsonl"}, "no prompt file or folder 'nowhere.jsonl'"),
    ],
)
def test_a_bad_setting_is_named_and_leaves_nothing(
    changes: dict[str, Any], message: str, tiny_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(PipelineError, match=message):
        execute(settings_of(tiny_run, out=str(out), **changes), LocalWorker)
    assert not [p for p in out.rglob("*") if p.is_file() and p.name != ".lock"]


def test_a_damaged_plan_is_told_before_anything_is_changed(tiny_run: Path, tmp_path: Path) -> None:
    for content in ("x", "[]", "{}"):
        out = shutil.copytree(tiny_run, tmp_path / f"out{len(content)}{content[0]}")
        (out / "plan" / "plan.json").write_text(content)
        with pytest.raises(PipelineError, match=r"plan\.json"):
            execute(settings_of(out), LocalWorker)
        assert data_files(out) == data_files(tiny_run)


def test_a_driver_killed_at_any_moment_resumes_to_the_same_bytes(
    tiny_run: Path, tmp_path: Path
) -> None:
    """SIGKILL a few times, at moments spread over the run; then let it finish."""
    settings = settings_of(tiny_run, out=str(tmp_path / "out"), max_new_tokens=200, rollout_rows=1)
    code = (
        "import sys; from pipeline.execute import execute, LocalWorker;"
        "from pipeline.settings import Settings;"
        "execute(Settings.model_validate_json(sys.argv[1]), LocalWorker)"
    )

    def finish(out: Path, kill_after: float | None) -> bool:
        text = settings.model_copy(update={"out": str(out)}).model_dump_json()
        process = subprocess.Popen([sys.executable, "-c", code, text], cwd=ROOT)
        if kill_after is not None:
            deadline = time.monotonic() + 60
            while not list(out.glob("commits/*")) and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(kill_after)
            process.kill()
        return process.wait(timeout=120) == 0

    assert finish(tmp_path / "clean", None)
    for kill_after in (0.0, 0.15, 0.3):
        finish(tmp_path / "out", kill_after)
    assert finish(tmp_path / "out", None)
    assert data_files(tmp_path / "out") == data_files(tmp_path / "clean")


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("400k", "no space left for the features still to be extracted: they take at least"),
        ("700k", "no space left; what is committed is whole"),
    ],
)
def test_a_full_disk_keeps_earlier_files_and_resumes(
    size: str, message: str, tiny_run: Path, tmp_path: Path
) -> None:
    """F7, on a real small file system (needs root for the mount): told before, and met midway."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here: run the tests as root")
    out = small / "out"
    try:
        with pytest.raises(IncompleteError, match=message):
            execute(settings_of(tiny_run, out=str(out)), LocalWorker)
        commits = RunFolder(out).read_commits()
        assert len(commits) >= 2
        for commit in commits.values():
            assert (out / commit.file).stat().st_size == commit.bytes
        subprocess.run(["mount", "-o", "remount,size=32m", str(small)], check=True)
        execute(settings_of(tiny_run, out=str(out)), LocalWorker)
        assert data_files(out) == data_files(tiny_run)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_the_same_prompt_under_other_ids_and_turns_is_answered_otherwise(
    tiny_run: Path, tmp_path: Path
) -> None:
    """D8: seeds come from the row's id and turn, so sampling never repeats itself."""
    prompts = tmp_path / "same.jsonl"
    chat = [
        {"role": "user", "content": "Say"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "Say"},
    ]
    prompts.write_text(
        "".join(json.dumps({"id": f"s{i}", "messages": chat}) + "\n" for i in "abcdefgh")
    )
    out = tmp_path / "out"
    execute(
        settings_of(tiny_run, out=str(out), prompts=str(prompts), max_new_tokens=24), LocalWorker
    )
    rows = shard_rows(out)
    assert len({tuple(row["input_ids"].tolist()) for row in rows}) == 8
    # A second turn draws from a seed of its own.
    seeds = {row_seed(7, f"turn {t}", f"s{i}") for t in (0, 1) for i in "abcdefgh"}
    assert len(seeds) == 16


# ---- resume


def test_what_is_there_is_neither_done_again_nor_touched(tiny_run: Path, tmp_path: Path) -> None:
    """No target model is loaded at all, and no file of the run is written anew."""
    out = shutil.copytree(tiny_run, tmp_path / "out")
    before = {p: p.stat().st_mtime_ns for p in out.glob("*/*.parquet")}

    def nobody(run: Run) -> LocalWorker:
        raise AssertionError("a worker was started")

    manifest = execute(settings_of(out), nobody)
    assert manifest["complete"] is True
    assert before == {p: p.stat().st_mtime_ns for p in out.glob("*/*.parquet")}


def test_verify_resume_finds_a_flipped_bit_and_makes_the_file_again(
    tiny_run: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(tiny_run, tmp_path / "out")
    victim = sorted((out / "data").iterdir())[1]
    content = bytearray(victim.read_bytes())
    content[1000] ^= 1
    victim.write_bytes(content)
    execute(settings_of(out), LocalWorker)
    assert victim.read_bytes() == content  # its size is right, and nobody asked
    execute(settings_of(out, verify_resume=True), LocalWorker)
    assert data_files(out) == data_files(tiny_run)


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_plan_file_is_planned_again(damage: str, tiny_run: Path, tmp_path: Path) -> None:
    out = shutil.copytree(tiny_run, tmp_path / "out")
    part = out / "plan" / "part-00001.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    if damage == "missing":
        part.unlink()
    shutil.rmtree(out / "commits")
    execute(settings_of(out), LocalWorker)
    assert part.read_bytes() == whole
    assert data_files(out) == data_files(tiny_run)


def test_shards_of_rollouts_that_came_out_otherwise_are_made_again(
    tiny_run: Path, tmp_path: Path
) -> None:
    """On a GPU a lost rollout file may not come back the same; its shards must not stay."""
    out = shutil.copytree(tiny_run, tmp_path / "out")
    folder = RunFolder(out)
    lost = folder.read_commits()["rollout-00001"]
    folder.take_back(lost)

    class Otherwise(LocalWorker):
        """Its answers begin with another token."""

        def __init__(self, run: Run) -> None:
            super().__init__(run)
            generate = self._worker.target.generate

            def other(prompts: Any, sampling: Any) -> Any:
                found = generate(prompts, sampling)
                return [
                    answer._replace(ids=np.concatenate([[65], answer.ids]).astype(np.int32))
                    for answer in found
                ]

            self._worker.target.generate = other  # type: ignore[method-assign]

    execute(settings_of(out), Otherwise)
    rollouts = {
        row["sample_id"]: row["input_ids"]
        for path in sorted((out / "rollouts").iterdir())
        for row in pq.read_table(path).to_pylist()
    }
    shards = {row["sample_id"]: row["input_ids"].tolist() for row in shard_rows(out)}
    clean = {row["sample_id"]: row["input_ids"].tolist() for row in shard_rows(tiny_run)}
    assert shards == rollouts
    assert sum(shards[name] != clean[name] for name in clean) == 3  # the part's rows
    assert len(list((out / "data").iterdir())) == len(folder.read_commits()) - 2


def test_a_million_prompts_are_planned_in_bounded_memory(tmp_path: Path) -> None:
    """Ids are remembered in a database file, not in memory; measured on 200,000."""
    code = (
        "import resource, sys; from pipeline.prompts import SeenIds; seen = SeenIds()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert all(seen.add(f'id-{i}') for i in range(200_000))\n"
        "assert not any(seen.add(f'id-{i}') for i in range(0, 200_000, 1000))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 16_000  # KiB; a set of digests takes 25,000


# ---- the forecast, and one stage alone


def test_a_forecast_writes_nothing_and_comes_near_the_truth(tiny_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = settings_of(tiny_run, out=str(out))
    told = dry_run(settings, LocalWorker, RunProgress(Console(quiet=True)))
    assert not out.exists()
    manifest = json.loads((tiny_run / "manifest.json").read_text())
    assert (told["rows"], told["rejected"]) == (7, 2)
    assert told["bytes_per_token"] == manifest["bytes_per_token"]
    # All seven rows fit into the probe, so only sampling in other company makes a difference.
    assert told["tokens"] == pytest.approx(manifest["tokens"], rel=0.1)
    size = sum(len(content) for content in data_files(tiny_run).values())
    assert told["bytes"] == pytest.approx(size, rel=0.2)
    assert told["shards"] == len(manifest["shards"])
    assert told["prompt_tokens"] + told["generated_tokens"] == told["tokens"]
    assert told["memory_per_worker"] > 2**27 and told["workers"] == 1
    assert told["seconds"]["rollouts"] > 0 and told["seconds"]["features"] > 0


def test_a_forecast_over_the_free_space_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    told = {
        "rows": 1_000_000,
        "rejected": 0,
        "prompt_tokens": 10**8,
        "generated_tokens": 9 * 10**8,
        "tokens": 10**9,
        "bytes_per_token": 11264,
        "bytes_per_token_on_disk": 7660,
        "bytes": 7_660_000_000_000,
        "shards": 22000,
        "seconds": {"rollouts": 7200.0, "features": 3600.0},
        "workers": 8,
        "memory_per_worker": 9_400_000_000,
        "gpu_memory_per_worker": 12_000_000_000,
        "free_bytes": 2_000_000_000_000,
        "probe": {"rows": 8, "tokens": 8000, "generated": 7200, "rollout_seconds": 10.0,
                  "feature_seconds": 1.0},
    }  # fmt: skip
    with pytest.raises(PipelineError, match=r"needs about 7\.7 TB, and 2\.0 TB are free"):
        print_forecast(told, "OUT")
    text = capsys.readouterr().out
    assert "100,000,000 prompt tokens + about 900,000,000 generated = 1,000,000,000 tokens" in text
    assert "about 3.0 h with 8 workers (2.0 h rollouts, 60 min features)" in text
    assert "720 generated tokens/s, 8,000 tokens/s of features" in text
    print_forecast({**told, "free_bytes": None}, "s3://x")
    assert "free at s3://x: not known" in capsys.readouterr().out


def test_the_stages_one_after_the_other(tiny_run: Path, tmp_path: Path) -> None:
    settings = settings_of(tiny_run, out=str(tmp_path / "out"))
    with pytest.raises(PipelineError, match="not all rollouts are there yet"):
        execute(settings, LocalWorker, stages=("features",))
    manifest = execute(settings, LocalWorker, stages=("rollouts",))
    assert (manifest["complete"], len(manifest["rollouts"]), manifest["shards"]) == (False, 2, [])
    assert execute(settings, LocalWorker, stages=("features",))["complete"] is True
    assert data_files(tmp_path / "out") == data_files(tiny_run)
