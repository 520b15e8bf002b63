#!/usr/bin/env bash
# Sets up a fresh Colab runtime with a T4, or any Linux machine with an NVIDIA GPU, and records the ladder on it.
# In a notebook, in a clone of the repository:
#     !bash docs/colab_t4.sh              look, check with a sanity kernel, install, record
#     !bash docs/colab_t4.sh --dry-run    look, and print what would be run
# Everything after --dry-run, or everything, is handed to `make gpu` as Hydra overrides (default: model=ms_marco).
# Python packages are pinned in docs/colab_t4.txt; torch's build and nvcc follow the CUDA version of the GPU's driver.
set -euo pipefail
cd "$(dirname "$0")/.."

dry_run=false
if [ "${1:-}" = --dry-run ]; then
    dry_run=true
    shift
fi
overrides=${*:-model=ms_marco} # the record's own model is on no hub

say() { echo "colab_t4: $*"; }
stop() {
    echo "colab_t4: $*" >&2
    exit 1
}
run() {
    echo "+ $*"
    if [ "$dry_run" = false ]; then "$@"; fi
}

# ---- Look: GPU, driver, nvcc, Python ----

command -v nvidia-smi >/dev/null || stop "no nvidia-smi, so no NVIDIA GPU (Colab: Runtime > Change runtime type > T4 GPU)"
gpu=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader | head -n 1) ||
    stop "nvidia-smi finds no GPU (Colab: Runtime > Change runtime type > T4 GPU)"
capability=${gpu##*, }
cuda=$(nvidia-smi | sed -n 's/.*CUDA Version: *\([0-9]*\)\..*/\1/p' | head -n 1)
arch=${capability/./}
case $arch in
'' | *[!0-9]*) stop "nvidia-smi gives no compute capability: $gpu" ;;
esac
[ "$arch" -ge 75 ] || stop "${gpu%%,*} has compute capability $capability; 7.5 (T4) is the oldest that is served"
[ "${cuda:-0}" -ge 12 ] || stop "the driver serves CUDA ${cuda:-of no version}; 12 is the oldest that is served"

nvcc=$(command -v nvcc || true)
if [ -z "$nvcc" ] && [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
    nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
fi
compiler=
if [ -n "$nvcc" ]; then
    compiler=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
    [ "$compiler" -le "$cuda" ] ||
        stop "$nvcc is of CUDA $compiler and the driver serves CUDA $cuda: put an nvcc of CUDA $cuda first on the PATH"
elif [ "$cuda" -lt 13 ]; then
    stop "no nvcc, and packages bring one for CUDA 13 only: install the CUDA 12 toolkit (apt-get install cuda-toolkit-12-6)"
fi
say "${gpu%%,*}, compute capability $capability, driver for CUDA $cuda, nvcc ${compiler:-to be installed}"

# ---- Check before the long downloads: one kernel of known result ----

if [ -n "$nvcc" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    run "$nvcc" -x cu -arch="sm_$arch" -o "$folder/sanity" cuda/tests/sanity.cc
    run "$folder/sanity"
fi

# ---- Install ----

if ! python3 -c 'import ensurepip' 2>/dev/null; then # Debian and Colab ship it apart
    run apt-get install -y -qq "python3.$(python3 -c 'import sys; print(sys.version_info.minor)')-venv"
fi
export PIP_CONSTRAINT=$PWD/docs/colab_t4.txt
run make env
if [ -z "$nvcc" ]; then
    run .venv/bin/python -m pip install --quiet nvidia-cuda-nvcc nvidia-cuda-cccl
fi

# ---- Record: `make gpu` begins with the sanity kernel and ends with what to commit ----

run make gpu OVERRIDES="$overrides"
