#!/usr/bin/env bash
# Installs the system packages that the launchers' tests can use: Slurm's daemons, an ssh server, pdsh, shellcheck.
# If they cannot be installed (no root, no apt, no network), the tests that need them say so and are skipped.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"
packages=(munge slurmctld slurmd slurm-client openssh-server openssh-client pdsh shellcheck)
PATH="$PATH:/usr/sbin"
missing=""
for program in munged slurmctld slurmd srun sshd ssh pdsh shellcheck; do
    command -v "$program" >/dev/null || missing=1
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "mst_scale: without root and apt-get the tests of Slurm and ssh may be skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if ! { timeout 120 apt-get update -qq && timeout 240 apt-get install -qq -y --no-install-recommends "${packages[@]}"; } \
    >/dev/null 2>&1; then
    echo "mst_scale: apt-get could not install ${packages[*]}: the tests that need them are skipped" >&2
fi
