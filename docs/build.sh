#!/usr/bin/env bash
# Builds the documentation site in build/docs, with warnings as errors; needs no network and no GPU.
#   bash docs/build.sh                    then open build/docs/index.html
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launchers/environment.sh
source launchers/environment.sh
exec sphinx-build -E -a -W --keep-going -b html docs build/docs "$@" # every page anew: each one shows the navigation
