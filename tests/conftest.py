"""What several test files share: a tiny random Llama on disk, and one finished run of it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# jobs/ is not installed with the package.
sys.path.insert(0, str(Path(__file__).parent.parent))
# Tests run side by side on few cores; these are read when torch and the tokenizers start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See tiny_llama.py."""
    from tiny_llama import write_tiny_llama

    path = tmp_path_factory.mktemp("tiny_llama")
    write_tiny_llama(path)
    return path


@pytest.fixture(scope="session")
def tiny_run(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run: 9 rows in, 2 rejected; 2 rollout parts, 2 shards.

    Read-only: copy it before changing anything.
    """
    from tiny_llama import run_tiny_llama

    return run_tiny_llama(tiny_llama_dir, tmp_path_factory.mktemp("tiny_run"))


@pytest.fixture(scope="session")
def nano_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve greedy answers of gemma4-nano on transformers, bfloat16. Read-only, as tiny_run."""
    from pipeline.execute import LocalWorker, execute
    from pipeline.settings import Settings

    base = tmp_path_factory.mktemp("nano")
    held_out = Path(__file__).parent.parent / "pipeline/data/gemma4-nano/held-out.jsonl"
    prompts = base / "prompts.jsonl"
    prompts.write_text("".join(held_out.read_text().splitlines(keepends=True)[:12]))
    settings = Settings.check(
        target="gemma4-nano",
        prompts=str(prompts),
        out=str(base / "out"),
        max_new_tokens=32,
        max_length=512,
    )
    execute(settings, LocalWorker)
    return base / "out"


@pytest.fixture(scope="session")
def every_set_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All feature sets of gemma4-nano, whose 8 blocks give dspark 1 to 5 and eagle3 1, 3, 4.

    Its prompts lie beside it as prompts.jsonl. Read-only, as tiny_run.
    """
    from pipeline.execute import LocalWorker, execute
    from pipeline.settings import Settings

    base = tmp_path_factory.mktemp("every_set")
    prompts = base / "prompts.jsonl"
    texts = ["def add(a, b):", "class Node:", "import os\\n", "x = 1"]
    prompts.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in texts))
    settings = Settings.check(
        target="gemma4-nano",
        prompts=str(prompts),
        out=str(base / "out"),
        features="mtp,dspark,eagle3",
        max_new_tokens=24,
        backend="transformers",
        dtype="float32",
        seed=5,
    )
    execute(settings, LocalWorker)
    return base / "out"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of a server process (s3_server.py), with credentials in the environment."""
    pytest.importorskip("moto", reason="S3 tests: pip install 'drafter-features[test]'")
    server_program = Path(__file__).parent / "s3_server.py"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, str(server_program), str(port)], stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    before = dict(os.environ)
    os.environ.update(
        AWS_ENDPOINT_URL=url,
        AWS_ACCESS_KEY_ID="key-of-the-test",
        AWS_SECRET_ACCESS_KEY="secret-of-the-test",
        AWS_DEFAULT_REGION="us-east-1",
    )
    yield url
    os.environ.clear()
    os.environ.update(before)
    server.kill()
    server.wait()
