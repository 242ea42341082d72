#!/usr/bin/env bash
# Builds the core with its C++ tests under AddressSanitizer + UndefinedBehaviorSanitizer and under
# ThreadSanitizer, and runs them. Needs only a C++17 compiler with the sanitizers' runtimes.
#
#   CXX=clang++ scripts/sanitize.sh          another compiler
set -euo pipefail
cd "$(dirname "$0")/.."

CXX="${CXX:-g++}"
BUILD=build/sanitize
CORE=(arena crc32c engine file reader shard_writer slots threads)
TESTS=(crc32c_test faults_test engine_test)
FLAGS=(-std=c++17 -O1 -g -Wall -Wextra -Werror -fno-omit-frame-pointer -pthread -Icsrc -Itests/cpp)

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

# ThreadSanitizer of older compilers cannot map its memory when the kernel randomises addresses by
# more bits than it knows; running without randomisation helps.
run() {
    if setarch "$(uname -m)" -R true 2>/dev/null; then
        TMPDIR="$scratch" timeout 120 setarch "$(uname -m)" -R "$@"
    else
        TMPDIR="$scratch" timeout 120 "$@"
    fi
}

build_and_run() {
    local name="$1" sanitizers="$2" source test job
    local out="$BUILD/$name"
    mkdir -p "$out"
    local pending=() objects=("${CORE[@]/#/$out/}")
    objects=("${objects[@]/%/.o}")
    for source in "${CORE[@]/#/csrc/}" "${TESTS[@]/#/tests/cpp/}"; do
        "$CXX" "${FLAGS[@]}" -fsanitize="$sanitizers" -fno-sanitize-recover=all \
            -c "$source.cc" -o "$out/$(basename "$source").o" &
        pending+=($!)
        if ((${#pending[@]} >= $(nproc))); then
            wait "${pending[0]}"
            pending=("${pending[@]:1}")
        fi
    done
    for job in "${pending[@]}"; do wait "$job"; done
    for test in "${TESTS[@]}"; do
        "$CXX" -fsanitize="$sanitizers" -pthread "$out/$test.o" "${objects[@]}" -o "$out/$test"
        echo "$name: $test"
        run "$out/$test"
    done
}

build_and_run address address,undefined
build_and_run thread thread
echo "sanitizers clean"
