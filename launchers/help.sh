# shellcheck shell=bash
# Prints the comment at the top of the script that was started, where a word of its command asks for --help; sourced.

# help FILE
help() {
    sed -n '2,/^[^#]/{/^#/!q;s/^# \{0,1\}//p}' "$1"
    exit 0
}

# help_if_asked FILE "$@"
help_if_asked() {
    local word
    for word in "${@:2}"; do
        case "$word" in --help | -h) help "$1" ;; esac
    done
}
[ "${BASH_SOURCE[0]}" != "$0" ] || help_if_asked "$0" "$@"
