#!/usr/bin/env bash
# The whole test suite in the project's own environment; arguments go to pytest.
#   bash launchers/test.sh                 everything this machine can run
#   bash launchers/test.sh -k selection    a part of it
#   MST_TEST_WORKERS=0 bash launchers/test.sh    in one process; otherwise two share the files of tests
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # several processes share the cores
exec python -m pytest -n "${MST_TEST_WORKERS:-2}" --dist loadfile "$@"
