# shellcheck shell=bash
# Finds Python and this package for the launchers, which are written in it (mst_scale/launch); sourced by them.

if [ "${BASH_SOURCE[0]}" = "$0" ]; then # started, not sourced
    # shellcheck source-path=SCRIPTDIR
    source "$(dirname "$0")/help.sh"
    help_if_asked "$0" "$@"
fi

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)" # the clone, or the package where it is installed
if [ -x "$root/.venv/bin/python" ]; then
    export PATH="$root/.venv/bin:$PATH"
    export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$root/.venv/torch_extensions}"
fi
case ":${PYTHONPATH:-}:" in
*":$root:"*) ;;
*) [ ! -d "$root/mst_scale" ] || export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" ;;
esac
