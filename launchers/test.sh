#!/usr/bin/env bash
# Runs the tests in the project's own environment; arguments go to pytest.
#   bash launchers/test.sh                the quick run: 10 to 20 minutes on two cores
#   bash launchers/test.sh --all          all but the slow tests, as CI does; of tests with several processes, the cases
#                                         that cover all values of their parameters
#   bash launchers/test.sh --every-case   the same tests with all cases: before a release
#   bash launchers/test.sh tests/unit -k selection    these tests, with nothing left out
#   MST_TEST_WORKERS=0 bash launchers/test.sh         in one process; by default, three share the test files
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # several processes share the cores
if [ $# -eq 0 ]; then
    set -- --quick
elif [ "$1" = --all ]; then
    set -- --fewer-cases "${@:2}"
elif [ "$1" = --every-case ]; then
    shift
fi
exec python -m pytest -n "${MST_TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder "$@" # conftest.py orders them
