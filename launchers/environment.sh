# shellcheck shell=bash
# Creates or reuses .venv with the tested versions; sourced by demo.sh and test.sh, which run from any directory.
# Afterwards PATH begins with the environment and the working directory is the project's root.

if [ "${BASH_SOURCE[0]}" = "$0" ]; then # started, not sourced
    # shellcheck source-path=SCRIPTDIR
    source "$(dirname "$0")/help.sh"
    help_if_asked "$0" "$@"
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
venv="$PWD/.venv"
extras="${MST_EXTRAS:-dev,mpi}"

fail() {
    printf 'mst_scale: %s\n' "$1" >&2
    exit 1
}

python="${PYTHON:-python3}"
command -v "$python" >/dev/null || fail "$python was not found: install Python 3.10 or newer, or name one: PYTHON=/path/to/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$("$python" --version) is too old: install Python 3.10 or newer, or name one: PYTHON=/path/to/python3.11"
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null ||
    fail "no C++ compiler was found: DeepSpeed builds small operators at first use (Debian, Ubuntu: apt-get install g++)"

# Reinstall only when the requirements have changed.
wanted="$(cat setup.py constraints.txt | cksum) $extras $("$python" --version)"
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
    echo "Installing into $venv (a few minutes the first time) …"
    log="$PWD/.venv-install.log"
    {
        { [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"; } &&
            "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
    } >"$log" 2>&1 || {
        grep -i 'error' "$log" | tail -n 5 >&2
        fail "the installation failed: see $log; fix what it names (network, disk space, compiler) and run this again, or start over with: rm -rf $venv"
    }
    rm -f "$log"
    printf '%s\n' "$wanted" >"$venv/.installed"
fi
export PATH="$venv/bin:$PATH"
# DeepSpeed compiles small operators at first use; each environment keeps its own, built for its own torch.
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$venv/torch_extensions}"
