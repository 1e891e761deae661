#!/usr/bin/env bash
# Install the peers from PyPI into a virtual environment: benches/peers/install.sh [VENV], by default target/peers/venv.
#
# llama-cpp-python comes as source: its CPU build needs a C++ compiler and some minutes (cmake and ninja come from PyPI).
# mistralrs is a wheel (x86-64 and arm64 Linux, macOS). A peer that cannot be installed is named and left out; compare.py
# then measures the others.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv="${1:-target/peers/venv}"
requirements=benches/peers/requirements.txt
mkdir -p "$(dirname "$venv")"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --upgrade pip
grep -v -e '^llama-cpp-python' -e '^mistralrs' "$requirements" | "$venv/bin/pip" install --quiet --requirement /dev/stdin

# Only the library: no servers, tools, tests or image models.
export CMAKE_ARGS="${CMAKE_ARGS:-} -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
-DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_CURL=OFF"
CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
export CMAKE_BUILD_PARALLEL_LEVEL
for peer in llama-cpp-python mistralrs; do
    if "$venv/bin/pip" install --quiet "$(grep "^$peer" "$requirements")"; then
        echo "$peer: installed"
    else
        echo "$peer: could not be installed; compare.py will leave it out" >&2
    fi
done
echo "next: $venv/bin/python benches/peers/compare.py"
