"""What trainers get: exact values and dtypes, every row once, resume to the row, §3's pairing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_files import shard_rows
from tampering import Tampered
from torch.utils.data import DataLoader
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from pipeline.errors import PipelineError
from pipeline.execute import LocalWorker, execute
from pipeline.loading import (
    FeatureDataset,
    FeatureStream,
    assistant_step,
    collate_mtp,
    draw_anchors,
    dspark_blocks,
    eagle3_examples,
    mtp_anchors,
    mtp_examples,
)
from pipeline.settings import Settings

WINDOW = 64  # of gemma4-nano


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve rows of gemma4-nano with all feature sets, in several shards, bfloat16."""
    base = tmp_path_factory.mktemp("loading")
    prompts = base / "prompts.jsonl"
    texts = [f"def f{i}(a):" + " # word" * (11 * i) for i in range(12)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    settings = Settings.check(
        target="gemma4-nano",
        prompts=str(prompts),
        out=str(base / "out"),
        backend="transformers",
        features="mtp,dspark,eagle3",
        max_new_tokens=24,
        rollout_rows=2,
        shard_mb=1,
        seed=5,
    )
    execute(settings, LocalWorker)
    return base / "out"


def names(rows: Any) -> list[str]:
    return [row["sample_id"] for row in rows]


def test_rows_are_the_stored_values_in_their_own_dtypes(run: Path) -> None:
    """bfloat16 comes back as bfloat16, to the bit: the stored float32 is its exact value."""
    dataset = FeatureDataset(run)
    stored = shard_rows(run)
    assert len(dataset) == len(stored) == 12
    assert len({group.file for group in dataset.index.groups}) > 1
    for row, expected in zip((dataset[i] for i in range(12)), stored, strict=True):
        assert list(row) == [c.name for c in dataset.index.layout.columns]
        for column in dataset.index.layout.columns:
            value = row[column.name]
            if not column.shape:
                assert value == expected[column.name]
                continue
            dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}.get(column.dtype)
            assert value.dtype == (dtype or torch.from_numpy(expected[column.name]).dtype)
            np.testing.assert_array_equal(value.float().numpy(), expected[column.name])
    assert dataset[-1]["sample_id"] == stored[-1]["sample_id"]
    with pytest.raises(IndexError, match="row 12 of 12"):
        dataset[12]


def test_a_projection_reads_only_its_columns(run: Path) -> None:
    dataset = FeatureDataset(run, ["input_ids", "sample_id"])
    assert list(dataset[3]) == ["sample_id", "input_ids"]
    with pytest.raises(PipelineError, match="no column 'hidden'; there are sample_id, "):
        FeatureDataset(run, ["hidden"])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_row_comes_once_over_ranks_and_workers(
    run: Path, world_size: int, workers: int
) -> None:
    everything = sorted(names(shard_rows(run)))
    seen: list[str] = []
    for rank in range(world_size):
        stream = FeatureStream(run, ["sample_id"], rank=rank, world_size=world_size, seed=1)
        seen += names(DataLoader(stream, batch_size=None, num_workers=workers))
    assert sorted(seen) == everything


def test_even_ranks_take_equally_many_rows(run: Path) -> None:
    taken = [
        names(FeatureStream(run, ["sample_id"], rank=rank, world_size=5, even=True))
        for rank in range(5)
    ]
    assert len({len(part) for part in taken}) == 1 and taken[0]
    flat = [name for part in taken for name in part]
    assert len(set(flat)) == len(flat)


def test_order_is_a_function_of_seed_and_epoch(run: Path) -> None:
    def order(seed: int, epoch: int) -> list[str]:
        stream = FeatureStream(run, ["sample_id"], seed=seed, buffer_groups=2)
        stream.set_epoch(epoch)
        return names(stream)

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    stream = FeatureStream(run, ["sample_id"], seed=1, buffer_groups=2)
    assert [names(stream), names(stream)] == [order(1, 0), order(1, 1)]
    unshuffled = FeatureStream(run, ["sample_id"], shuffle=False)
    assert names(unshuffled) == names(shard_rows(run))


@pytest.mark.parametrize("stop", [0, 1, 4, 7, 11, 12])
def test_resume_goes_on_at_the_very_row(run: Path, stop: int) -> None:
    def stream() -> FeatureStream:
        return FeatureStream(run, ["sample_id"], seed=3, buffer_groups=2)

    whole = stream()
    expected = names(whole) + names(whole)
    first = stream()
    taken = []
    for row in first:
        if len(taken) == stop:
            break
        taken.append(row["sample_id"])
    state = json.loads(json.dumps(first.state_dict()))
    if stop < 12:  # the row that the loop looked at and left is not lost
        assert state["taken"] == [stop + 1]
        state["taken"] = [stop]
    again = stream()
    again.load_state_dict(state)
    assert taken + names(again) + (names(again) if stop < 12 else []) == expected


@pytest.mark.parametrize("batches", [0, 1, 3, 4])
def test_resume_behind_a_plain_dataloader(run: Path, batches: int) -> None:
    def loader(stream: FeatureStream) -> Any:
        return DataLoader(stream, batch_size=2, num_workers=2, collate_fn=names)

    def stream() -> FeatureStream:
        return FeatureStream(run, ["sample_id"], seed=3)

    expected = list(loader(stream()))
    again = stream()
    state = stream().state_dict(batches=batches, batch_size=2, num_workers=2)
    again.load_state_dict(state)
    rest = list(loader(again))
    flat = [name for batch in expected[batches:] for name in batch]
    assert sorted(name for batch in rest for name in batch) == sorted(flat)
    again = stream()
    again.load_state_dict(state)
    if any(state["taken"]):
        with pytest.raises(PipelineError, match="2 DataLoader workers, not 1"):
            list(again)


def test_a_state_of_other_data_is_refused(run: Path) -> None:
    stream = FeatureStream(run, ["sample_id"], seed=3)
    for key, value in (("seed", 4), ("world_size", 2), ("fingerprint", "0")):
        with pytest.raises(PipelineError, match=f"the state has {key} {value}"):
            stream.load_state_dict({**stream.state_dict(), key: value})


def test_what_cannot_be_trusted_is_refused(run: Path, tmp_path: Path) -> None:
    def broken(name: str) -> Tampered:
        return Tampered(run, tmp_path / name)

    unfinished = broken("unfinished")
    unfinished.edit_json("manifest.json", complete=False)
    with pytest.raises(PipelineError, match="not finished"):
        FeatureDataset(unfinished.out)
    assert len(FeatureDataset(unfinished.out, allow_incomplete=True)) == 12
    missing = broken("missing")
    missing.path("train-00001").unlink()
    with pytest.raises(PipelineError, match=r"train-00001.*is missing"):
        FeatureDataset(missing.out)
    flipped = broken("flipped")
    path = flipped.path("train-00000")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(PipelineError, match=r"train-00000.*is damaged"):
        FeatureDataset(flipped.out, verify_sha256=True)
    with pytest.raises(PipelineError, match=r"train-00000.*cannot be read.*CRC"):
        list(FeatureStream(flipped.out))
    foreign = broken("foreign")
    foreign.edit_json("manifest.json", fingerprint="0" * 64)
    with pytest.raises(PipelineError, match="is of another run"):
        FeatureDataset(foreign.out)


def naive_examples(row: dict[str, Any], n: int, depth: int) -> dict[str, Any]:
    """DESIGN §3, word by word."""
    length, h = len(row["input_ids"]), row["final_hidden"]
    ahead = [n + k for k in range(1, depth + 1)]
    supervised = [j < length and bool(row["loss_mask"][j]) for j in ahead]
    return {
        "token_ids": int(row["input_ids"][n]),
        "hidden": h[n - 1],
        "positions": row["position_offset"] + n,
        "label_ids": [int(row["input_ids"][j]) if j < length else -100 for j in ahead],
        "label_mask": [all(supervised[: k + 1]) for k in range(depth)],
        "teacher_ids": [row["teacher_top_ids"][j - 1].tolist() for j in ahead if j <= length],
        "latent": [h[j - 1] for j in ahead if j <= length],
    }


def test_mtp_examples_pair_what_the_contract_says(run: Path) -> None:
    row = FeatureDataset(run)[9]
    length = len(row["input_ids"])
    anchors = [1, WINDOW + 9, *range(length - 5, length)]
    examples = mtp_examples(row, anchors, 3, window=WINDOW)
    for i, n in enumerate(anchors):
        expected = naive_examples(row, n, 3)
        assert int(examples.token_ids[i]) == expected["token_ids"]
        assert int(examples.positions[i]) == expected["positions"]
        assert torch.equal(examples.hidden[i], expected["hidden"])
        assert examples.label_ids[i].tolist() == expected["label_ids"]
        assert examples.label_mask[i].tolist() == expected["label_mask"]
        for k, ids in enumerate(expected["teacher_ids"]):
            assert examples.teacher_ids[i, k].tolist() == ids
            assert torch.equal(examples.latent[i, k], expected["latent"][k])
        kv = examples.sliced_kv(i)
        for kind, window in (("sliding", WINDOW), ("full", length)):
            first = max(0, n - window)
            key, value = kv[f"{kind}_attention"]
            assert torch.equal(key[0].transpose(0, 1), row[f"{kind}_key"][first:n])
            assert torch.equal(value[0].transpose(0, 1), row[f"{kind}_value"][first:n])
    with pytest.raises(PipelineError, match=r"must lie in \[1, "):
        mtp_examples(row, [0], 3, window=WINDOW)
    with pytest.raises(PipelineError, match="extracted with --depth 3"):
        mtp_examples(row, [1], 4, window=WINDOW)


def test_anchors_are_where_the_next_token_is_supervised(run: Path) -> None:
    row = FeatureDataset(run)[2]
    anchors = mtp_anchors(row)
    mask = row["loss_mask"].tolist()
    assert anchors.tolist() == [n for n in range(1, len(mask) - 1) if mask[n + 1]]
    drawn = draw_anchors(row, 5, torch.Generator().manual_seed(0))
    assert len(drawn) == 5 and set(drawn.tolist()) <= set(anchors.tolist())
    assert drawn.tolist() == sorted(drawn.tolist())


def assistant(dataset: FeatureDataset) -> Any:
    """A random Gemma4Assistant with a sliding and a full layer, of the sizes of the rows' KV."""
    torch.manual_seed(0)
    row = dataset[0]
    text = Gemma4TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=row["sliding_key"].shape[1],
        head_dim=row["sliding_key"].shape[2],
        global_head_dim=row["full_key"].shape[2],
        sliding_window=WINDOW,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=2,
    )
    config = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=row["final_hidden"].shape[1]
    )
    model = Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


@torch.inference_mode()
def test_batched_masks_equal_the_assistant_run_one_anchor_at_a_time(run: Path) -> None:
    """Rows of different lengths, anchors before and behind the window, three depths."""
    dataset = FeatureDataset(run)
    model = assistant(dataset)
    rows = [
        {k: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in r.items()}
        for r in (dataset[0], dataset[9], dataset[11])
    ]
    assert len(rows[1]["input_ids"]) > WINDOW + 20
    generator = torch.Generator().manual_seed(1)
    examples = [
        mtp_examples(
            row,
            torch.cat([torch.tensor([1]), draw_anchors(row, count, generator)]),
            3,
            window=WINDOW,
        )
        for row, count in zip(rows, (3, 8, 5), strict=True)
    ]
    batch = collate_mtp(examples)
    assert batch.real.sum(dim=1).tolist() == [4, 9, 6]
    size = batch.hidden.shape[-1]
    embeddings = torch.randn(64, size, generator=generator)
    state, tokens = batch.hidden, batch.token_ids % 64
    alone = [[(e.hidden[i], e.token_ids[i] % 64) for i in range(len(e.anchors))] for e in examples]
    for _ in range(3):
        logits, state = assistant_step(model, embeddings[tokens], state, batch)
        tokens = logits.argmax(dim=-1)
        for b, e in enumerate(examples):
            for i, n in enumerate(e.anchors.tolist()):
                hidden, token = alone[b][i]
                out = model(
                    inputs_embeds=torch.cat([embeddings[token], hidden])[None, None],
                    position_ids=torch.tensor([[rows[b]["position_offset"] + n]]),
                    shared_kv_states=e.sliced_kv(i),
                )
                scale = out.logits.abs().max()
                assert (logits[b, i] - out.logits[0, 0]).abs().max() <= 1e-6 * max(1.0, scale)
                alone[b][i] = (out.last_hidden_state[0, 0], out.logits[0, 0].argmax())
    # A mask that is off by one row, of either layer type, is far from that.
    for kind in batch.kv_mask:
        mask = batch.kv_mask[kind]
        first, _ = assistant_step(model, embeddings[batch.token_ids % 64], batch.hidden, batch)
        changed = mask.roll(1, dims=-1)
        changed[..., 0] = True
        batch.kv_mask[kind] = changed  # type: ignore[index]
        other, _ = assistant_step(model, embeddings[batch.token_ids % 64], batch.hidden, batch)
        batch.kv_mask[kind] = mask  # type: ignore[index]
        assert (first - other)[batch.real].abs().max() > 1e-3


def test_dspark_blocks_see_only_what_is_known(run: Path) -> None:
    dataset = FeatureDataset(run)
    layers = dataset.index.semantics.layers["dspark"]
    assert layers == (1, 2, 3, 4, 5)
    row = dataset[3]
    blocks = dspark_blocks(row, 4, layers=layers)
    ids, mask, length = row["input_ids"].tolist(), row["loss_mask"].tolist(), len(row["input_ids"])
    assert blocks.anchors.tolist() == [n for n in range(1, length - 1) if mask[n + 1]]
    for i, n in enumerate(blocks.anchors.tolist()):
        places = range(n, n + 4)
        assert blocks.token_ids[i].tolist() == [ids[p] if p < length else -100 for p in places]
        assert blocks.positions[i].tolist() == [row["position_offset"] + p for p in places]
        good = [all(p < length and mask[p] for p in range(n + 1, n + 1 + j)) for j in range(4)]
        assert blocks.label_mask[i].tolist() == [False, *good[1:]]
        for j, p in enumerate(places):
            if j > 0 and p < length:
                assert torch.equal(blocks.teacher_ids[i, j], row["teacher_top_ids"][p - 1].long())
        assert blocks.context_mask[i].tolist() == [p < n for p in range(length)]
    wide = torch.cat([row[f"block_{i}_hidden"] for i in layers], dim=1)
    assert torch.equal(blocks.context, wide)
    with pytest.raises(PipelineError, match=r"no outputs of the blocks \[7\]"):
        dspark_blocks(row, 4, layers=[1, 7])
    with pytest.raises(PipelineError, match="predicts nothing"):
        dspark_blocks(row, 1, layers=layers)


def test_eagle3_examples_are_shifted_by_one(run: Path) -> None:
    dataset = FeatureDataset(run)
    layers = dataset.index.semantics.layers["eagle3"]
    row = dataset[4]
    got = eagle3_examples(row, layers=layers)
    ids, length = row["input_ids"].tolist(), len(row["input_ids"])
    for t in range(length - 2):
        assert (int(got.token_ids[t]), int(got.label_ids[t])) == (ids[t + 1], ids[t + 2])
        assert bool(got.label_mask[t]) == bool(row["loss_mask"][t + 2])
        assert torch.equal(got.teacher_logprobs[t], row["teacher_top_logprobs"][t + 1])
        parts = [row[f"block_{i}_hidden"][t] for i in layers]
        assert torch.equal(got.hidden[t], torch.cat(parts))
        assert got.final_hidden is not None
        assert torch.equal(got.final_hidden[t], row["final_hidden"][t + 1])
        assert int(got.positions[t]) == row["position_offset"] + t
    # The same pairing as MTP's: example t is the anchor n = t + 1.
    mtp = mtp_examples(row, [5], 1, window=WINDOW)
    assert int(mtp.token_ids[0]) == int(got.token_ids[4])
    assert int(mtp.label_ids[0, 0]) == int(got.label_ids[4])
