#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: builds, runs the test suite on it, checks every kernel with
# compute-sanitizer. JOBS processes at a time; logs go to OUT.
#   bash bench/cuda_check.sh [build] [test] [sanitize]      these three if none is named
# TESTS: files instead of all of tests/. tests/cuda/test_cuda.py, exact and matmul take most of the time.
# METALMM_EMULATED=FILE: results of the emulator that `python tests/support/kernel_cases.py FILE` wrote, for
# a machine without the ziglang package. There, bring torch_metalmm/ptx/ too.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"  # scripts of tests/ run from this checkout
OUT=${OUT:-build/cuda_check}
JOBS=${JOBS:-$(($(nproc) > 2 ? $(nproc) - 2 : 1))}
mkdir -p "$OUT"

build() {
  # The C++ library as a shared one: torch has it too, and two copies of its locales do not mix.
  LDFLAGS="${LDFLAGS:-} -Wl,--no-as-needed -nostdlib++ -l:libstdc++.so.6" \
    python3 setup.py build_ext --inplace > "$OUT/build.log" 2>&1 || { tail -40 "$OUT/build.log"; exit 1; }
  if python3 -c "import ziglang" 2> /dev/null; then python3 -m torch_metalmm.msl.ptx; fi
}

# The log names every test, so that of a run that is cut off it is known what was left.
run_tests() {
  local failed=0
  OMP_NUM_THREADS=1 METALMM_TEST_BACKENDS=cuda python3 -m pytest -vv -rfE -n "$JOBS" --dist worksteal \
    ${TESTS:-tests} -k cuda --continue-on-collection-errors > "$OUT/test.log" 2>&1 || failed=1
  grep -E "^(FAILED|ERROR)|passed|failed" "$OUT/test.log" || tail -20 "$OUT/test.log"
  return "$failed"
}

# One case per kernel, without torch's cache of memory, so that every buffer has an end.
sanitize() {
  local tool i failed=0 ids=()
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  for tool in memcheck racecheck; do
    ids=()
    for ((i = 0; i < JOBS; i++)); do
      compute-sanitizer --tool "$tool" --error-exitcode 9 python3 tests/support/kernel_cases.py cuda "$i" "$JOBS" \
        > "$OUT/$tool.$i.log" 2>&1 &
      ids+=($!)
    done
    for i in "${ids[@]}"; do wait "$i" || failed=1; done
    grep -h "SUMMARY" "$OUT/$tool".*.log | sort | uniq -c
    awk '/^ran/ { n += $2 } END { print "kernels:", n }' "$OUT/$tool".*.log
  done
  return "$failed"
}

for step in "${@:-build test sanitize}"; do
  for s in $step; do
    case $s in
      build) build ;;
      test) run_tests ;;
      sanitize) sanitize ;;
      *) echo "cuda_check: unknown step '$s'; build, test or sanitize" >&2; exit 2 ;;
    esac
  done
done
