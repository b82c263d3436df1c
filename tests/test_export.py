"""Runs in other trainers' formats, by value; shard sets that split and merge without a trace."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from rich.console import Console
from run_files import data_files
from safetensors.torch import load_file
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.errors import PipelineError
from pipeline.execute import LocalWorker, execute
from pipeline.export import deepspec, export_run
from pipeline.loading import FeatureDataset, FeatureStream
from pipeline.models.nano import NANO_FOLDER
from pipeline.settings import Settings
from pipeline.shard_sets import merge_sets, split_run
from pipeline.validate import validate
from pipeline.vocab import read_vocab
from pipeline.vocab.command import write_vocab


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gemma4-nano (8 blocks) with all sets, and the last block, which speculators needs."""
    base = tmp_path_factory.mktemp("export")
    prompts = base / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"def f{i}(a):" + " # word" * 40}) + "\n" for i in range(6))
    )
    settings = Settings.check(
        target="gemma4-nano",
        prompts=str(prompts),
        out=str(base / "out"),
        backend="transformers",
        features="mtp,dspark,eagle3",
        layers=["eagle3=1,3,4,7"],
        max_new_tokens=40,
        rollout_rows=2,
        shard_mb=1,
    )
    execute(settings, LocalWorker)
    return base / "out"


@pytest.fixture(scope="module")
def rows(run: Path) -> list[dict[str, Any]]:
    dataset = FeatureDataset(run)
    return [dataset[i] for i in range(len(dataset))]


def test_speculators_files_hold_the_blocks_and_the_state_before_the_norm(
    run: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    done = export_run(str(run), tmp_path / "out", "speculators")
    assert done.rows == len(rows) == 6
    # Its numbers are those of the inputs: what block 1 gives is what layer 2 takes.
    assert (done.blocks, done.layer_ids) == ((1, 3, 4), [2, 4, 5])
    table = load_from_disk(str(tmp_path / "out"))
    for i, row in enumerate(rows):
        stored = load_file(tmp_path / "out" / "hidden_states" / f"hs_{i}.safetensors")
        assert torch.equal(stored["token_ids"], row["input_ids"].long())
        assert torch.equal(stored["token_ids"], table[i]["input_ids"])
        assert torch.equal(table[i]["loss_mask"].to(torch.uint8), row["loss_mask"])
        assert int(table[i]["seq_len"]) == len(row["input_ids"])
        assert stored["hidden_states"].dtype == torch.bfloat16
        for place, block in enumerate((1, 3, 4, 7)):
            assert torch.equal(stored["hidden_states"][:, place], row[f"block_{block}_hidden"])


def test_the_final_norm_of_the_last_block_gives_the_final_states(
    rows: list[dict[str, Any]],
) -> None:
    """What speculators computes from what it is given; of states that are normed it would not."""
    (weight,) = (
        tensor.float()
        for name, tensor in load_file(NANO_FOLDER / "model.safetensors").items()
        if name.endswith("model.norm.weight")
    )

    def norm(states: torch.Tensor) -> torch.Tensor:
        wide = states.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    for row in rows:
        wanted = row["final_hidden"].float()
        right = (norm(row["block_7_hidden"]) - wanted).norm() / wanted.norm()
        twice = (norm(row["final_hidden"]) - wanted).norm() / wanted.norm()
        assert right < 0.01 and twice > 0.1


def test_speculators_own_reader_takes_them(
    run: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    data = pytest.importorskip(
        "speculators.train.data", reason="pip install speculators (it needs another datasets)"
    )
    export_run(str(run), tmp_path / "out", "speculators")
    theirs = data.ArrowDataset(max_len=4096, datapath=str(tmp_path / "out"), on_missing="raise")
    assert len(theirs) == len(rows)
    for i, row in enumerate(rows):
        item = theirs[i]
        wide = torch.cat([row[f"block_{b}_hidden"] for b in (1, 3, 4)], dim=1)
        assert torch.equal(item["hidden_states"], wide)
        assert torch.equal(item["verifier_last_hidden_states"], row["block_7_hidden"])
        assert torch.equal(item["input_ids"], row["input_ids"].long())
        assert torch.equal(item["loss_mask"].to(torch.uint8), row["loss_mask"])


def test_specforge_files_load_without_running_code(
    run: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert export_run(str(run), tmp_path / "out", "specforge").rows == 6
    files = sorted((tmp_path / "out").rglob("*.ckpt"))
    assert [p.relative_to(tmp_path / "out").as_posix() for p in files] == [
        f"rows_0-5000/data_{i}.ckpt" for i in range(6)
    ]
    for path, row in zip(files, rows, strict=True):
        stored = torch.load(path, weights_only=True)
        assert stored.keys() == {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state"}
        assert torch.equal(stored["input_ids"], row["input_ids"].long())
        assert torch.equal(stored["loss_mask"], row["loss_mask"].long())
        assert torch.equal(stored["hidden_state"], row["final_hidden"][None])
        wide = torch.cat([row[f"block_{b}_hidden"] for b in (1, 3, 4)], dim=1)
        assert torch.equal(stored["aux_hidden_state"], wide[None])
        # No file carries its whole row group along.
        assert path.stat().st_size < 1.2 * 2 * len(row["input_ids"]) * 256 * 4 + 20000


def test_specforge_own_readers_take_them(
    run: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Its file reader and its normalisers; that of eagle3 clears the last token's mask itself."""
    reason = "pip install --no-deps specforge==0.2.0 (it needs another torch)"
    eagle3 = pytest.importorskip("specforge.algorithms.eagle3.data", reason=reason)
    dflash = pytest.importorskip("specforge.algorithms.common.dflash_family_data", reason=reason)
    reader = pytest.importorskip("specforge.runtime.data_plane.offline_reader", reason=reason)
    store = pytest.importorskip("specforge.runtime.data_plane.feature_store", reason=reason)
    keys = {
        "eagle3": ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state"),
        "dspark": ("input_ids", "loss_mask", "hidden_states", "target_last_hidden_states"),
    }
    for features, blocks in (("eagle3", (1, 3, 4)), ("dspark", (1, 2, 3, 4, 5))):
        out = tmp_path / features
        export_run(str(run), out, "specforge", features)
        refs = reader.OfflineManifestReader(str(out), feature_keys=keys[features]).read()
        assert len(refs) == len(rows) == 6
        for ref, row in zip(refs, rows, strict=True):
            raw = store.load_feature_file(ref.feature_store_uri.removeprefix("file://"))
            wide = torch.cat([row[f"block_{b}_hidden"] for b in blocks], dim=1)
            ids, mask = row["input_ids"].long()[None], row["loss_mask"].long()[None]
            if features == "eagle3":
                item = eagle3.normalize_offline_sample(raw, max_len=4096)
                assert torch.equal(item["target"], row["final_hidden"][None])
                assert torch.equal(item["hidden_state"], wide[None])
                mask[0, -1] = 0
            else:
                item = dflash.normalize_dspark_offline_sample(raw, max_len=4096)
                assert torch.equal(item["target_last_hidden_states"], row["final_hidden"][None])
                assert torch.equal(item["hidden_states"], wide[None])
            assert torch.equal(item["input_ids"], ids)
            assert torch.equal(item["loss_mask"], mask)


def test_specforge_dspark_files_and_the_rows_its_reader_refuses(
    run: Path, tmp_path: Path, tiny_llama_dir: Path
) -> None:
    """Given answers of one token and its terminator are two in a row; cut to one they are not."""
    done = export_run(str(run), tmp_path / "a", "specforge", "dspark")
    stored = torch.load(tmp_path / "a/rows_0-5000/data_0.ckpt", weights_only=True)
    assert stored.keys() == {
        "input_ids", "loss_mask", "hidden_states", "target_last_hidden_states",
    }  # fmt: skip
    assert (done.rows, list(done.left_out), done.layer_ids) == (6, [], [1, 2, 3, 4, 5])
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"id": i, "prompt": f"x{i}"}) + "\n" for i in range(3)))
    settings = Settings.check(
        target="gemma4-nano",
        prompts=str(prompts),
        out=str(tmp_path / "short"),
        backend="transformers",
        features="mtp,dspark",
        max_new_tokens=1,
    )
    execute(settings, LocalWorker)
    done = export_run(str(tmp_path / "short"), tmp_path / "b", "specforge", "dspark")
    assert done.rows == 0 and len(done.left_out) == 3
    assert json.loads((tmp_path / "b/export.json").read_text())["left_out"] == list(done.left_out)


def test_draft_vocabulary_goes_where_the_trainer_looks(run: Path, tmp_path: Path) -> None:
    vocab = tmp_path / "v"
    write_vocab(
        str(run),
        vocab,
        size=700,
        must_include=[],
        markov=False,
        target=None,
        console=Console(quiet=True),
    )
    kept = read_vocab(vocab)
    export_run(str(run), tmp_path / "s", "speculators", vocab=vocab)
    assert np.load(tmp_path / "s" / "d2t-700.npy").tolist() == kept.d2t.tolist()
    assert np.load(tmp_path / "s" / "t2d-700.npy").dtype == np.bool_
    assert np.load(tmp_path / "s" / "t2d-700.npy").tolist() == kept.t2d.tolist()
    assert len(load_from_disk(str(tmp_path / "s"))) == 6
    export_run(str(run), tmp_path / "f", "specforge", vocab=vocab)
    mapping = torch.load(tmp_path / "f" / "vocab_mapping.pt", weights_only=True)
    assert mapping["d2t"].tolist() == kept.d2t.tolist()
    assert mapping["t2d"].tolist() == kept.t2d.tolist()
    with pytest.raises(PipelineError, match="no place for a draft vocabulary"):
        export_run(str(run), tmp_path / "x", "deepspec", vocab=vocab)
    with pytest.raises(PipelineError, match="of eagle3 only"):
        export_run(str(run), tmp_path / "x", "specforge", "dspark", vocab=vocab)
    assert not (tmp_path / "x").exists()


def test_blocks_by_choice(run: Path, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    done = export_run(str(run), tmp_path / "a", "deepspec", layers="7,2")
    assert done.layer_ids == [2, 7]
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["target_layer_ids"] == [2, 7]
    wide = (tmp_path / "a" / "shard-00000.bin").read_bytes()[6 * len(rows[0]["input_ids"]) :]
    first = torch.frombuffer(bytearray(wide[: 2 * 512]), dtype=torch.bfloat16)
    pair = [rows[0][f"block_{b}_hidden"][0] for b in (2, 7)]
    assert torch.equal(first, torch.cat(pair))
    with pytest.raises(PipelineError, match="no block_0_hidden; it holds the blocks 1,2,3,4,5,7"):
        export_run(str(run), tmp_path / "b", "deepspec", layers="0,2")
    with pytest.raises(PipelineError, match=r"takes 3 blocks, not \[1, 3\]"):
        export_run(str(run), tmp_path / "b", "specforge", layers="1,3")


@pytest.mark.parametrize(("shard_bytes", "shards"), [(deepspec.SHARD_BYTES, 1), (500_000, 6)])
def test_deepspec_cache_is_read_as_its_format_says(
    run: Path,
    rows: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shard_bytes: int,
    shards: int,
) -> None:
    monkeypatch.setattr(deepspec, "SHARD_BYTES", shard_bytes)
    assert export_run(str(run), tmp_path / "out", "deepspec").rows == 6
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["num_shards"] == len(manifest["shards"]) == shards
    assert manifest["target_layer_ids"] == [1, 2, 3, 4, 5] and manifest["hidden_size"] == 256
    assert manifest["index_record_size"] == 56 and manifest["num_samples"] == 6
    index = (tmp_path / "out" / "samples.idx").read_bytes()
    files = [(tmp_path / "out" / s["file_name"]).read_bytes() for s in manifest["shards"]]
    for i, row in enumerate(rows):
        number, shard, length, *offsets = struct.unpack_from("<QIIQQQQQ", index, 56 * i)
        assert (number, length) == (i, len(row["input_ids"]))

        def read(place: int, kind: str, count: int, shard: int = shard) -> Any:
            return np.frombuffer(files[shard], kind, count, offsets[place])  # noqa: B023

        assert read(0, "<i4", length).tolist() == row["input_ids"].tolist()
        assert read(1, "u1", length).tolist() == [1] * length
        assert read(2, "u1", length).tolist() == row["loss_mask"].tolist()
        wide = torch.cat([row[f"block_{b}_hidden"] for b in (1, 2, 3, 4, 5)], dim=1)
        states = torch.from_numpy(read(3, "<u2", wide.numel()).copy()).view(torch.bfloat16)
        assert torch.equal(states.view(length, -1), wide)
        final = torch.from_numpy(read(4, "<u2", length * 256).copy()).view(torch.bfloat16)
        assert torch.equal(final.view(length, -1), row["final_hidden"])


def test_what_cannot_be_exported_leaves_nothing(nano_run: Path, run: Path, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="extract with --features mtp,eagle3"):
        export_run(str(nano_run), tmp_path / "a", "specforge")
    with pytest.raises(PipelineError, match=r"has no block_7_hidden; .*--layers eagle3=1,3,4,7"):
        export_without_last(tmp_path)
    (tmp_path / "there").mkdir()
    with pytest.raises(PipelineError, match="exists already"):
        export_run(str(run), tmp_path / "there", "deepspec")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.jsonl", "plain", "there"]


def export_without_last(base: Path) -> None:
    prompts = base / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "x"}) + "\n")
    settings = Settings.check(
        target="gemma4-nano",
        prompts=str(prompts),
        out=str(base / "plain"),
        backend="transformers",
        features="eagle3",
        max_new_tokens=4,
    )
    execute(settings, LocalWorker)
    export_run(str(base / "plain"), base / "b", "speculators")


def test_split_sets_are_valid_and_merge_to_the_very_run(run: Path, tmp_path: Path) -> None:
    before = data_files(run)
    sets = split_run(run, 2, tmp_path / "sets")
    assert [p.name for p in sets] == ["set-0", "set-1"]
    names = [set(data_files(part)) for part in sets]
    assert not names[0] & names[1] and names[0] | names[1] == set(before)
    assert all(any(name.startswith("data/") for name in part) for part in names)
    for part in sets:
        assert validate(part, allow_missing=True).findings == ()
        assert not validate(part).ok
    ids = [
        row["sample_id"]
        for part in sets
        for row in FeatureStream(part, ["sample_id"], allow_missing=True)
    ]
    assert sorted(ids) == sorted(r["sample_id"] for r in FeatureStream(run, ["sample_id"]))
    assert merge_sets(sets[::-1], tmp_path / "whole") == len(before)
    assert data_files(tmp_path / "whole") == before == data_files(run)
    assert validate(tmp_path / "whole").findings == ()


def test_sets_that_do_not_belong_together(run: Path, nano_run: Path, tmp_path: Path) -> None:
    first, second = split_run(run, 2, tmp_path / "sets")
    with pytest.raises(PipelineError, match="only sets of the same run"):
        merge_sets([first, nano_run], tmp_path / "x")
    with pytest.raises(PipelineError, match="in none of the sets; nothing was merged"):
        merge_sets([first], tmp_path / "x")
    victim = next((second / "data").iterdir())
    data = bytearray(victim.read_bytes())
    data[100] ^= 1
    victim.unlink()  # a link to the run's own file
    victim.write_bytes(data)
    with pytest.raises(PipelineError, match=r"damaged in .*set-1"):
        merge_sets([first, second], tmp_path / "x")
    assert merge_sets([first, second, run], tmp_path / "x")  # another copy is good
    assert validate(tmp_path / "x").ok
    with pytest.raises(PipelineError, match="--parts 99: the run has"):
        split_run(run, 99, tmp_path / "y")
    assert not (tmp_path / "y").exists()


def test_the_commands(run: Path, tmp_path: Path) -> None:
    words = ["export", str(run), "--to", "deepspec", "-o", str(tmp_path / "d")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "wrote 6 rows for deepspec" in done.output
    done = CliRunner().invoke(app, ["split", str(run), "--parts", "2", "-o", str(tmp_path / "s")])
    assert done.exit_code == 0 and done.output.count("wrote") == 2
    sets = [str(tmp_path / "s" / f"set-{i}") for i in (0, 1)]
    done = CliRunner().invoke(app, ["merge", *sets, "-o", str(tmp_path / "m")])
    assert done.exit_code == 0 and "merged" in done.output
