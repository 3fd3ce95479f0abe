#!/usr/bin/env bash
# Methods × seeds: the runs of a comparison, one after the other or as jobs, and their table.
#
#   mst launch sweep [options] CONFIG [arguments of mst_scale.pretrain]
#   mst launch sweep --methods dense,tiny,static,rigl,mst gpt2_small
#   mst launch sweep --with slurm --with-option --nodes --with-option 2 gpt2_small
#
#   CONFIG            a file, or a ready config by name
#   --methods A,B,…   default: dense,tiny,static,rigl,mst (the paper's table)
#   --seeds 1,2,…     default: 1,2,3,4 (the paper's four)
#   --out DIR         the runs lie in DIR/METHOD-SEED (default: runs/sweep)
#   --with LAUNCHER   local (default), hostfile, mpi, or slurm, which submits a job for each run
#   --with-option W   one more word for that launcher, repeatable
#   --table           only the table of what is there
#   --dry-run         show what would run
#
# Finished runs are passed over, so the same command continues a sweep. A run that fails does not stop the others.
# SIGTERM and Ctrl-C let the run of the moment save, and end the sweep. In a clone also: bash launchers/sweep.sh
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/shared.sh"

methods=dense,tiny,static,rigl,mst seeds=1,2,3,4 out=runs/sweep with=local options=() only_table=""
while [ "$#" -gt 0 ]; do
    case "$1" in
    --help | -h) help "${BASH_SOURCE[0]}" ;;
    --dry-run) dry_run=1; shift ;;
    --methods) methods="$(value_of "$@")" || exit; shift 2 ;;
    --seeds) seeds="$(value_of "$@")" || exit; shift 2 ;;
    --out) out="$(value_of "$@")" || exit; shift 2 ;;
    --with) with="$(value_of "$@")" || exit; shift 2 ;;
    --with-option) word="$(value_of "$@")" || exit; options+=("$word"); shift 2 ;;
    --table) only_table=1; shift ;;
    -*) wrong "unknown option $1: see --help" ;;
    *) break ;;
    esac
done
need_config "${1:-}"
with="${with%.sh}"
case "$with" in local | hostfile | mpi | slurm) ;; *) wrong "--with $with: choose local, hostfile, mpi or slurm" ;; esac
[[ "$methods" =~ ^[a-z-]+(,[a-z-]+)*$ ]] || wrong "--methods $methods: write names with commas between"
[[ "$seeds" =~ ^[0-9]+(,[0-9]+)*$ ]] || wrong "--seeds $seeds: write numbers with commas between"

ask_to_stop() { kill -TERM "$1" 2>/dev/null || true; } # the launcher below lets its run save
listen
failed=0
for seed in ${seeds//,/ }; do
    for method in ${methods//,/ }; do
        [ -z "$only_table$stopping" ] || continue
        command=(bash "$here/$with.sh" ${dry_run:+--dry-run} "${options[@]}"
            "$@" --method "$method" --set "training.seed=$seed" --out "$out/$method-$seed")
        if [ -n "$dry_run" ]; then
            "${command[@]}"
        elif grep -qs '"how": "finished"' "$out/$method-$seed/run.json"; then
            echo "$out/$method-$seed is finished"
        else
            echo "$out/$method-$seed"
            guarded "${command[@]}" || [ -n "$stopping" ] || failed=$((failed + 1))
        fi
    done
done
[ -z "$dry_run" ] || exit 0
[ -z "$stopping" ] || echo "the sweep was asked to stop: the same command continues"
python - "$out" "$methods" "$seeds" <<'TABLE'
import json, pathlib, statistics, sys

out, methods, seeds = pathlib.Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(",")
print(f"{'method':<14}{'runs':>5}{'validation loss':>18}{'± over seeds':>14}{'FLOPs':>8}")
for method in methods:
    losses, share = [], []
    for seed in seeds:
        path = out / f"{method}-{seed}" / "metrics.jsonl"
        rows = [json.loads(line) for line in path.open() if line.endswith("\n")] if path.exists() else []
        rows = [row for row in rows if row.get("val_loss") is not None]
        if rows:
            losses.append(rows[-1]["val_loss"])
            share.append(rows[-1]["flops"] / rows[-1]["flops_dense"])
    if losses:
        spread = f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "–"
        print(f"{method:<14}{len(losses):>5}{statistics.mean(losses):>18.4f}{spread:>14}{statistics.mean(share):>8.2f}")
    else:
        print(f"{method:<14}{0:>5}{'–':>18}{'–':>14}{'–':>8}")
TABLE
[ "$failed" -eq 0 ] || failed "$failed runs failed: the same command tries them again"
