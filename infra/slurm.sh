#!/bin/bash
# Ray on SLURM: the first node of the allocation is the head and runs the job, all give their GPUs.
#
#   sbatch infra/slurm.sh --target /models/target.gguf --prompts prompts.jsonl --out /scratch/run
#
# Everything after the script's name goes to jobs/extract_mtp.py. Submit it from the repository's
# root, on a file system that all nodes share, with the virtual environment in .venv. A job that hits
# its time limit or loses a node: submit the very same line again, it resumes. --requeue does that.
#SBATCH --job-name=drafter-features
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-task=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"
# shellcheck disable=SC1091  # made by the installation, not part of the repository
source .venv/bin/activate
# A token left by an earlier local Ray would make this cluster ask for one.
export RAY_AUTH_MODE=disabled

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
port=$((20000 + SLURM_JOB_ID % 20000)) # jobs that share a node do not meet
export RAY_ADDRESS="$head:$port"

start() { # NODE ARGUMENT…: a Ray node that stays in the foreground of its own step
  local node=$1
  shift
  srun --nodes=1 --ntasks=1 --nodelist="$node" --overlap \
    ray start --block --disable-usage-stats \
    --num-cpus="${SLURM_CPUS_PER_TASK:-1}" --num-gpus="${SLURM_GPUS_PER_TASK:-0}" "$@" &
}

start "$head" --head --port="$port"
for _ in $(seq 60); do
  ray status --address "$RAY_ADDRESS" >/dev/null 2>&1 && break
  sleep 2
done
for node in "${nodes[@]:1}"; do
  start "$node" --address="$RAY_ADDRESS"
done

# The batch shell gets TERM two minutes before the limit and hands it on: the job then leaves with
# everything committed. Waiting in the background lets the trap run at once.
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
  python jobs/extract_mtp.py "$@" &
job=$!
trap 'kill -TERM "$job"' TERM
code=0
wait "$job" || code=$?
kill %1 2>/dev/null || true
exit "$code"
