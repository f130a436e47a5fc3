#!/usr/bin/env bash
# Prepares this checkout for one kind of accelerator and says what is missing.
#
#   DEEPINFER_ACCELERATOR=cpu|nvidia|ascend ./build.sh      (default: cpu)
#
# Makes .venv as `make venv` does. With DEEPINFER_NO_VENV=1 nothing is installed and the packages of PYTHON (python3)
# are checked instead: use it where torch came with the machine or its container.
# Exit codes: 0 ready, 2 unknown accelerator, 3 something is missing (listed).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

accelerator="${DEEPINFER_ACCELERATOR:-cpu}"
python="${PYTHON:-python3}"
missing=()

lacks() { missing+=("$1"); }

have() { command -v "$1" >/dev/null 2>&1; }

finish_if_missing() {
  if ((${#missing[@]} == 0)); then return; fi
  echo "not ready for ${accelerator}; missing:" >&2
  printf '  - %s\n' "${missing[@]}" >&2
  exit 3
}

check_tools() {
  if ! have "${python}"; then
    lacks "${python}: install Python 3.11 to 3.13, or name one with PYTHON=..."
  elif ! "${python}" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
    lacks "Python 3.11 to 3.13: $("${python}" --version 2>&1) was found; name another with PYTHON=..."
  elif [[ "${DEEPINFER_NO_VENV:-}" != 1 ]] && ! "${python}" -c 'import ensurepip, venv' 2>/dev/null; then
    lacks "the venv module of ${python}: on Debian and Ubuntu, install python3-venv"
  fi
  if [[ "${DEEPINFER_NO_VENV:-}" != 1 ]] && ! have make; then lacks "make"; fi
}

prepare_python() {
  if [[ "${DEEPINFER_NO_VENV:-}" == 1 ]]; then return; fi
  if ! make --silent venv; then
    lacks "the packages of .venv: the install above failed"
    finish_if_missing
  fi
  python=.venv/bin/python
}

# imports MODULE WHAT-TO-DO: notes MODULE as missing when it cannot be imported.
imports() {
  if ! "${python}" -c "import $1" >/dev/null 2>&1; then lacks "the Python package $1: $2"; fi
}

# holds EXPRESSION WHAT-TO-DO: notes the text as missing when the Python expression is false. torch is imported.
holds() {
  if ! "${python}" -W ignore -c "import sys, torch; sys.exit(not ($1))" >/dev/null 2>&1; then lacks "$2"; fi
}

check_nvidia_driver() {
  if ! have nvidia-smi; then
    lacks "nvidia-smi: install the NVIDIA driver (in a container, start it with the GPUs passed through)"
  elif ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    lacks "a GPU: nvidia-smi is there but lists none"
  fi
}

check_nvidia_packages() {
  imports torch "install a CUDA build of it"
  if ((${#missing[@]} == 0)); then
    holds 'torch.version.cuda' \
      "a CUDA build of torch: a CPU build is installed; run 'make clean' and point DEEPINFER_TORCH_INDEX at an index of CUDA builds"
    if ((${#missing[@]} == 0)); then
      holds 'torch.cuda.is_available()' \
        "a GPU that torch can use: the driver is likely older than torch's CUDA; update it or install a torch for an older CUDA"
    fi
  fi
  imports triton "it comes with CUDA builds of torch on Linux; else 'pip install triton'"
}

check_ascend_driver() {
  if ! have npu-smi; then
    lacks "npu-smi: install the Ascend driver and firmware (in a container, pass the devices through)"
  elif ! npu-smi info >/dev/null 2>&1; then
    lacks "an NPU: npu-smi is there but 'npu-smi info' fails"
  fi
  local cann="${ASCEND_HOME_PATH:-${ASCEND_TOOLKIT_HOME:-/usr/local/Ascend/ascend-toolkit/latest}}"
  if [[ ! -d "${cann}" ]]; then
    lacks "CANN: no toolkit at ${cann}; install it and source its set_env.sh"
  elif [[ -z "${ASCEND_HOME_PATH:-${ASCEND_TOOLKIT_HOME:-}}" ]]; then
    lacks "CANN's environment: source set_env.sh of the toolkit at ${cann}"
  fi
}

check_ascend_packages() {
  imports torch "install the version that your torch_npu names"
  imports torch_npu "'pip install torch-npu' in the version that matches torch and CANN"
  if ((${#missing[@]} == 0)); then
    holds '__import__("torch_npu").npu.is_available()' "an NPU that torch_npu can use: compare its version with CANN's"
  fi
}

case "${accelerator}" in
  cpu | nvidia | ascend) ;;
  *)
    echo "DEEPINFER_ACCELERATOR=${accelerator} is unknown; known: cpu, nvidia, ascend" >&2
    exit 2
    ;;
esac

check_tools
# The driver comes before the install: without it, gigabytes would be fetched for nothing.
if [[ "${accelerator}" != cpu ]]; then "check_${accelerator}_driver"; fi
finish_if_missing
prepare_python
if [[ "${accelerator}" == cpu ]]; then
  imports torch "install it, or run without DEEPINFER_NO_VENV=1"
else
  "check_${accelerator}_packages"
fi
finish_if_missing
echo "ready for ${accelerator}: $("${python}" -W ignore -c 'import sys, torch; print("Python", sys.version.split()[0], "torch", torch.__version__)')"
