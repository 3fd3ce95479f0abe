#!/usr/bin/env bash
# Pretrain under Slurm: submits one job that trains, saves before its time is up or when it is preempted, requeues itself
# and goes on, until the run is finished.
#
#   mst launch slurm [options] CONFIG [arguments of mst_scale.pretrain]
#   mst launch slurm --nodes 4 --time 24:00:00 --partition a100 gpt3_1.3b --out /shared/runs/1.3b
#
#   CONFIG              a file, or a ready config by name
#   --nodes N           nodes (default 1)
#   --gpus-per-node N   GPUs and ranks of each (default 8); 0: ranks on the CPU, see --ranks-per-node
#   --ranks-per-node N  ranks of each node, if not its GPUs
#   --cpus-per-rank N   cores for each rank (default: your cluster's)
#   --time T            of one job, in Slurm's form (default: your cluster's); the run may take many jobs
#   --partition P, --account A, --job-name NAME
#   --log FILE          the job's output (default: slurm-JOB.out in this folder)
#   --grace S           seconds between the warning and the end of a job, enough for one save (default 300)
#   --starter NAME      srun: one task for each rank (default); deepspeed: its launcher on each node
#   --restarts N        start again so often within a job when it fails (default 3)
#   --requeues N        and after that in other jobs, on other nodes (default 5); preemption does not count
#   --doctor            first look at the nodes (mst doctor, on all ranks); what is wrong there ends the job, once and for all
#   --sbatch OPTION     one more word for sbatch, repeatable: --sbatch --qos=long
#   --dry-run           show what would be submitted, and what the job would start
#
# The same command continues a run that has ended. The environment: cluster.sh. Save now and go on in another job with
# scancel --signal=USR1 JOB; stop for good with scancel --signal=TERM --batch JOB (it saves), at once with scancel JOB.
# In a clone also: bash launchers/slurm.sh
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/shared.sh"

nodes=1 gpus=8 ranks="" cpus="" grace=300 starter=srun requeues=5 doctor="" options=() exported=() log="slurm-%j.out"
while [ "$#" -gt 0 ]; do
    case "$1" in
    --help | -h) help "${BASH_SOURCE[0]}" ;;
    --dry-run) dry_run=1; shift ;;
    --nodes) nodes="$(number_of "$@")" || exit; shift 2 ;;
    --gpus-per-node) gpus="$(number_of "$@")" || exit; shift 2 ;;
    --ranks-per-node) ranks="$(number_of "$@")" || exit; shift 2 ;;
    --cpus-per-rank) cpus="$(number_of "$@")" || exit; shift 2 ;;
    --time | --partition | --account | --job-name) word="$(value_of "$@")" || exit; options+=("$1=$word"); shift 2 ;;
    --log) log="$(value_of "$@")" || exit; shift 2 ;;
    --grace) grace="$(number_of "$@")" || exit; shift 2 ;;
    --starter) starter="$(value_of "$@")" || exit; shift 2 ;;
    --restarts) restarts="$(number_of "$@")" || exit; shift 2 ;;
    --requeues) requeues="$(number_of "$@")" || exit; shift 2 ;;
    --doctor) doctor=1; shift ;;
    --sbatch) word="$(value_of "$@")" || exit; options+=("$word"); shift 2 ;;
    -*) wrong "unknown option $1: see --help" ;;
    *) break ;;
    esac
done
need_config "${1:-}"
case "$starter" in srun | deepspeed) ;; *) wrong "--starter $starter: choose srun or deepspeed" ;; esac
[ -n "$ranks" ] || ranks="$gpus"
[ "$ranks" -gt 0 ] || wrong "how many ranks on each node? --ranks-per-node N"
need_whole_groups "$1" "each node=$ranks" -- "${@:2}"
if [ "$gpus" -gt 0 ]; then
    options+=("--gpus-per-node=$gpus")
else
    exported=(DS_ACCELERATOR=cpu "OMP_NUM_THREADS=${OMP_NUM_THREADS:-${cpus:-1}}")
fi
[ -z "$doctor" ] || exported+=(MST_DOCTOR=1)
[ -z "${exported[0]+set}" ] || export "${exported[@]}"
tasks=1
[ "$starter" = deepspeed ] || tasks="$ranks"
per_task="$cpus"
[ "$starter" = srun ] || [ -z "$cpus" ] || per_task=$((cpus * ranks))

# B: only the job's shell gets the warning, and hands it on; it must live to requeue the job.
command=(sbatch --nodes="$nodes" --ntasks-per-node="$tasks" ${per_task:+--cpus-per-task="$per_task"} --requeue
    --open-mode=append --output="$log" --signal="B:USR1@$grace" "${options[@]}"
    "$here/slurm_job.sh" "$root" "$starter" "$ranks" "$restarts" "$requeues" "$@")
if [ -n "$dry_run" ]; then
    show ${exported[0]+env} "${exported[@]}" "${command[@]}"
    exec env MST_DRY_RUN=1 SLURM_JOB_NUM_NODES="$nodes" ${per_task:+SLURM_CPUS_PER_TASK="$per_task"} \
        bash "${command[@]: -$(($# + 6))}" # and what the job starts
fi
command -v sbatch >/dev/null || wrong "there is no sbatch here: log in where jobs are submitted, or use mst launch hostfile"
exec "${command[@]}"
