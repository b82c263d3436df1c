#!/usr/bin/env bash
# Ray on SLURM: one Ray node on each node of the allocation, and the job on the first.
#
#   sbatch --nodes 4 --gpus-per-node 8 infra/slurm.sh --config run.yaml --out /shared/OUT
#
# Everything after the script's name goes to jobs/extract_mtp.py; OUT, target model and prompts must
# lie where all nodes see them. Submit from the repository's root, with the environment in .venv
# there (or VENV=DIR); all nodes use that one. A job that is preempted, loses a node or comes to its
# time limit is put back into the queue and goes on from its commits.
#SBATCH --job-name=extract-mtp
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --output=extract-mtp-%j.log
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
# shellcheck source=/dev/null
source "${VENV:-.venv}/bin/activate"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Jobs that share a head node must not share a port or a directory; the token keeps strangers out.
port=$((20000 + SLURM_JOB_ID % 10000))
head=$(srun --nodes=1 --ntasks=1 -w "${nodes[0]}" hostname --ip-address | awk '{print $1}')
export RAY_ADDRESS="$head:$port" RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN
resources=(--num-cpus "$SLURM_CPUS_PER_TASK" --num-gpus "${SLURM_GPUS_ON_NODE:-0}")

start_node() { # start_node NODE OPTION...: a Ray node that lives as long as its step
  local node=$1
  shift
  # A step does not inherit --cpus-per-task, and without it Ray would be bound to one CPU.
  env -u RAY_ADDRESS srun --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" -w "$node" \
    ray start --block --disable-usage-stats "${resources[@]}" "$@" &
  steps+=("$!")
}

steps=()
driver=
# shellcheck disable=SC2329  # the trap calls it
stop() {
  # The driver first: it finishes what it is writing and says how to go on.
  if [[ -n $driver ]]; then
    kill -TERM "$driver" 2> /dev/null || true
    wait "$driver" || true
  fi
  kill -TERM "${steps[@]}" 2> /dev/null || true
  wait
}
trap stop EXIT
trap 'exit 143' TERM
trap 'scontrol requeue "$SLURM_JOB_ID"; exit 143' USR1  # the time limit is near

start_node "${nodes[0]}" --head --node-ip-address="$head" --port="$port" \
  --temp-dir="/tmp/ray-$SLURM_JOB_ID" --include-dashboard=false
for node in "${nodes[@]:1}"; do
  start_node "$node" --address="$RAY_ADDRESS"
done

# Wait until every node has joined.
python - "${#nodes[@]}" << 'PYTHON'
import sys, time, ray

wanted, deadline = int(sys.argv[1]), time.monotonic() + 600
while True:
    try:
        ray.init(log_to_driver=False)
        there = sum(node["Alive"] for node in ray.nodes())
    except ConnectionError:
        there = 0
    if there >= wanted:
        break
    if time.monotonic() > deadline:
        sys.exit(f"only {there} of {wanted} nodes joined Ray within 10 minutes")
    ray.shutdown()
    time.sleep(2)
PYTHON

python jobs/extract_mtp.py "$@" &
driver=$!
code=0
wait "$driver" || code=$?
driver=
exit "$code"
