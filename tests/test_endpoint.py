"""Rollouts from a server that takes and returns token ids.

The server is a small real HTTP server around our own llama.cpp backend (around transformers where
llama-cpp-python is not installed): llama-cpp-python's own server does not return ids.
"""

import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_server import LlamaServer
from run_files import data_files, shard_rows

from pipeline import endpoint
from pipeline.errors import IncompleteError, PipelineError
from pipeline.execute import LocalWorker, execute
from pipeline.models.base import TargetModel
from pipeline.models.load import find_target, load_eos_ids, load_target, load_tokenizer
from pipeline.models.nano import write_nano_gguf
from pipeline.settings import Settings

LLAMACPP = importlib.util.find_spec("llama_cpp") is not None


@pytest.fixture(scope="module")
def nano_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What --target names: gemma4-nano as a GGUF where llama.cpp can run it."""
    if not LLAMACPP:
        return "gemma4-nano"
    return str(write_nano_gguf(tmp_path_factory.mktemp("nano"))[0])


@pytest.fixture(scope="module")
def served(nano_target: str) -> TargetModel:
    files = find_target(nano_target)
    return load_target(
        files,
        backend="llamacpp" if LLAMACPP else "transformers",
        dtype="float32",
        kv_cache_dtype="float32",
        device="cpu",
        threads=1,
        max_length=1024,
        eos_ids=load_eos_ids(files, load_tokenizer(files)),
    )


@pytest.fixture
def serve(served: TargetModel) -> Iterator[Callable[..., LlamaServer]]:
    servers: list[LlamaServer] = []

    def start(kind: str, mode: str = "") -> LlamaServer:
        servers.append(LlamaServer(served, kind, mode))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = ["def close(self):", "class Error(Exception):", "def size(self, path):", "import os"]
    two = [
        ("user", "def a(x):"),
        ("assistant", "return x"),
        ("user", "def b(x):\n" + "# so\n" * 20),
    ]
    rows = [
        {"id": f"p{i}", "messages": [{"role": "user", "content": t}]} for i, t in enumerate(texts)
    ]
    rows.append({"id": "two", "messages": [{"role": r, "content": c} for r, c in two]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(target: str, prompts: Path, out: Path, **changes: Any) -> Settings:
    values = {"max_new_tokens": 24, "dtype": "float32", "kv_cache_dtype": "float32"}
    return Settings.check(
        target=target, prompts=str(prompts), out=str(out), max_length=1024, **values, **changes
    )


@pytest.mark.parametrize("kind", ["llama-server", "vllm"])
def test_the_rows_are_those_of_the_model_itself(
    kind: str, serve: Any, nano_target: str, prompts: Path, tmp_path: Path
) -> None:
    server = serve(kind)
    here = settings(nano_target, prompts, tmp_path / "here")
    there = settings(nano_target, prompts, tmp_path / "there", rollout_endpoint=server.url)
    execute(here, LocalWorker)
    manifest = execute(there, LocalWorker)
    for mine, theirs in zip(
        shard_rows(tmp_path / "here"), shard_rows(tmp_path / "there"), strict=True
    ):
        for name in ("sample_id", "finish_reason", "on_policy"):
            assert mine[name] == theirs[name]
        assert np.array_equal(mine["input_ids"], theirs["input_ids"])
        assert np.array_equal(mine["loss_mask"], theirs["loss_mask"])
    assert {row["finish_reason"] for row in shard_rows(tmp_path / "there")} == {"stop", "length"}
    assert manifest["generated_by"] == "endpoint"
    assert len(server.requests) == 6  # five conversations, one of them with two turns
    asked = server.requests[0]
    assert asked["temperature"] == 0 and asked["top_p"] == 1 and asked["min_p"] == 0
    # Nothing is asked again.
    execute(there, LocalWorker)
    assert len(server.requests) == 6


def test_a_server_that_returns_only_text_is_refused(
    serve: Any, nano_target: str, prompts: Path, tmp_path: Path
) -> None:
    server = serve("llama-server", "text-only")
    there = settings(nano_target, prompts, tmp_path / "out", rollout_endpoint=server.url)
    with pytest.raises(PipelineError, match=r"returns text without token ids.*not on-policy"):
        execute(there, LocalWorker)


def test_a_busy_server_is_asked_again(
    serve: Any, nano_target: str, prompts: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(endpoint.time, "sleep", waits.append)
    server = serve("llama-server", "busy-first")
    there = settings(nano_target, prompts, tmp_path / "out", rollout_endpoint=server.url)
    assert execute(there, LocalWorker)["rows_out"] == 5
    assert len(server.requests) == 8 and set(waits) <= {1.0, 2.0} and len(waits) == 2


def test_a_refused_request_rejects_its_row_only(
    serve: Any, nano_target: str, prompts: Path, tmp_path: Path
) -> None:
    server = serve("vllm", "refuse-long")
    there = settings(nano_target, prompts, tmp_path / "out", rollout_endpoint=server.url)
    manifest = execute(there, LocalWorker)
    assert manifest["rejected"] == {"endpoint_error": 1} and manifest["rows_out"] == 4
    reject = json.loads((tmp_path / "out" / "rejects.jsonl").read_text())
    assert reject["sample_id"] == "two" and "HTTP 400" in reject["detail"]


def test_an_end_whose_ids_lack_the_terminator_is_not_made_up(
    serve: Any, nano_target: str, prompts: Path, tmp_path: Path
) -> None:
    """D4: no invented end-of-sequence token."""
    server = serve("vllm", "no-end")
    there = settings(nano_target, prompts, tmp_path / "out", rollout_endpoint=server.url)
    manifest = execute(there, LocalWorker)
    kept = shard_rows(tmp_path / "out")
    assert manifest["rejected"]["endpoint_error"] == 5 - len(kept) > 0
    assert {row["finish_reason"] for row in kept} <= {"length"}


def test_a_server_that_goes_away_leaves_a_run_to_resume(
    serve: Any, nano_target: str, prompts: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(endpoint.time, "sleep", lambda seconds: None)
    server = serve("llama-server")
    out = tmp_path / "out"
    there = settings(nano_target, prompts, out, rollout_endpoint=server.url, rollout_rows=2)
    first = threading.Event()
    answer = server.target.generate

    def dying(*args: Any) -> Any:
        if first.is_set():
            raise ConnectionError  # the handler's thread ends without an answer
        if len(server.requests) >= 3:
            first.set()
        return answer(*args)

    server.target.generate = dying
    try:
        with pytest.raises(IncompleteError, match=r"6 requests failed, last: \w+; what is"):
            execute(there, LocalWorker)
    finally:
        server.target.generate = answer
    assert len(list((out / "commits").glob("rollout-*"))) == 1
    execute(there, LocalWorker)
    clean = tmp_path / "clean"
    execute(there.model_copy(update={"out": str(clean)}), LocalWorker)
    assert data_files(out) == data_files(clean)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9", "ConnectionError; is the server up"),
        ("ftp://x", "must be an http"),
        ("http://me:secret@x", "credentials in it"),
    ],
)
def test_bad_urls_are_told_without_their_secrets(
    url: str, message: str, nano_target: str, prompts: Path, tmp_path: Path
) -> None:
    there = settings(nano_target, prompts, tmp_path / "out", rollout_endpoint=url)
    with pytest.raises(PipelineError, match=message) as raised:
        execute(there, LocalWorker)
    assert "secret" not in str(raised.value)
    for path in (tmp_path / "out").rglob("*.json"):
        assert "secret" not in path.read_text()


def test_endpoint_and_own_rollouts_are_different_runs(
    serve: Any, nano_target: str, prompts: Path, tmp_path: Path
) -> None:
    execute(settings(nano_target, prompts, tmp_path / "out"), LocalWorker)
    there = settings(
        nano_target, prompts, tmp_path / "out", rollout_endpoint=serve("llama-server").url
    )
    with pytest.raises(PipelineError, match=r"generated_by: there '\w+', now 'endpoint'"):
        execute(there, LocalWorker)
