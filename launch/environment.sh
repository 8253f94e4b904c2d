# shellcheck shell=bash
# For the other scripts to source: make_environment FOLDER EXTRAS makes a virtual environment with this package in it,
# at the versions of constraints.txt, and activates it. An environment that is up to date is used again.
# pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS ...) choose where packages come from.

make_environment() {
    local folder=$1 extras=$2 wanted pip=(-m pip install --disable-pip-version-check)
    [ -t 1 ] || pip+=(--quiet) # at a terminal pip shows what it is at, with progress bars
    find_python
    wanted=$(cat pyproject.toml constraints.txt - <<<"$extras $PWD" | cksum)
    if [ "$(cat "$folder/ready" 2>/dev/null)" != "$wanted" ]; then
        echo "Making the environment $folder (once; a few minutes) ..." >&2
        rm -f "$folder/ready"
        [ -x "$folder/bin/python" ] || "$PYTHON" -m venv "$folder"
        warn_of_cuda_download "$folder/bin/python"
        "$folder/bin/python" "${pip[@]}" -c constraints.txt -e ".[$extras]"
        echo "$wanted" >"$folder/ready"
    fi
    # shellcheck disable=SC1091
    . "$folder/bin/activate"
}

# The first Python that is new enough: TRL 1.16 needs 3.11.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            PYTHON=$candidate
            return
        fi
    done
    echo "error: no Python 3.11 or newer is here: install one, or name it with PYTHON=/path/to/python" >&2
    exit 2
}

# Without a GPU, torch's CUDA build works too, but brings gigabytes for nothing: say so before pip fetches them.
warn_of_cuda_download() {
    PATH=$PATH:/usr/lib/wsl/lib command -v nvidia-smi >/dev/null && return
    "$1" -c 'import torch' 2>/dev/null && return
    "$1" -m pip install --quiet --disable-pip-version-check --dry-run --report - -c constraints.txt torch 2>/dev/null |
        "$1" launch/download_size.py >&2 || true
}
