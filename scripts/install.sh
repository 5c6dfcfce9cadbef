# Sourced by quickstart.sh and test.sh, from the repository's root.
# install_package [EXTRA] makes .venv and installs the package into it, editable, at the versions
# of constraints.txt. Where packages come from is the user's own pip configuration, nothing here.
# PYTHON names the interpreter for a new .venv (default: python3).

VENV_PYTHON="$PWD/.venv/bin/python"

# What an installation depends on; the folder too, since an editable install points into it.
_install_state() {
    { echo "$PWD"; "$VENV_PYTHON" --version; cat setup.py pyproject.toml constraints.txt; } | cksum
}

_make_venv() {
    local python="${PYTHON:-python3}"
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "flow_grpo needs Python 3.10 or newer, and $python is $("$python" --version 2>&1);" \
            "name another with PYTHON=/path/to/python3.11" >&2
        return 1
    fi
    if ! "$python" -m venv --clear .venv; then
        echo "could not make .venv with $python; on Debian and Ubuntu: apt install python3-venv" >&2
        return 1
    fi
}

install_package() {
    local extra="${1:-}" stamp
    for stamp in ".venv/installed-${extra:-base}" .venv/installed-test; do
        if [[ -f "$stamp" && "$(cat "$stamp")" == "$(_install_state 2>/dev/null)" ]]; then
            return 0
        fi
    done
    # A .venv whose making was interrupted has a python but no pip yet.
    "$VENV_PYTHON" -m pip --version >/dev/null 2>&1 || _make_venv || return 1
    rm -f .venv/installed-*
    echo "installing into .venv: a few minutes and about 2 GB, the first time only"
    # torch first and alone, at its pin: so a build that the user's index or wheel folder offers
    # for it is taken before anything else can ask for a range of versions.
    "$VENV_PYTHON" -m pip install -c constraints.txt torch || return 1
    "$VENV_PYTHON" -m pip install -c constraints.txt -e ".${extra:+[$extra]}" || return 1
    _install_state >".venv/installed-${extra:-base}"
}
