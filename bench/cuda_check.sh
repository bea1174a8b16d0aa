#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: builds, runs the test suite on it, checks every kernel with
# compute-sanitizer, times the formats. JOBS processes at a time; records go to OUT.
#   bash bench/cuda_check.sh [build] [test] [sanitize] [time]      these four if none is named
#   bash bench/cuda_check.sh build tokens norm                     tokens of 8B and 1B models, ops with a norm
#   bash bench/cuda_check.sh build attention contexts              attention on caches, tokens by context and cache
# TESTS: files instead of all of tests/. tests/cuda/test_cuda.py, exact and matmul take most of the time.
# METALMM_EMULATED=FILE: results of the emulator that `python tests/support/kernel_cases.py FILE` wrote, for
# a machine without the ziglang package. There, bring torch_metalmm/ptx/ too.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"  # scripts of tests/ run from this checkout
OUT=${OUT:-build/cuda_check}
JOBS=${JOBS:-$(($(nproc) > 2 ? $(nproc) - 2 : 1))}
FORMATS=${FORMATS:-f16,q4_0,q8_0,q2_k,q3_k,q4_k,q6_k,affine2_g64,affine3_g64,affine4_g64,affine8_g64}
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

# The records of a command of the benchmark, in the file that is named first.
record() {
  python3 -m bench "${@:2}" --device cuda --markdown --json "$OUT/$1.jsonl"
}

for step in "${@:-build test sanitize time}"; do
  for s in $step; do
    case $s in
      build) build ;;
      test) run_tests ;;
      sanitize) sanitize ;;
      time) record times matmul --shapes 128256x4096,32000x4096,14336x4096 --m 1,8,16,512 --formats "$FORMATS" \
        --engines metalmm,mv_f16,linear_f16 ;;
      tokens) record tokens tokens --models "${MODELS:-8b,1b}" --repetitions 5 --new-tokens 16 ;;
      norm) record norm norm --repetitions 10 ;;
      experts) record experts experts --formats q4_0,q4_k,q8_0,mxfp4,affine4_g64 --repetitions 10 ;;
      attention) record attention attention --compile --repetitions 10 --seconds 0.2 ;;
      contexts) record contexts tokens --models "${MODELS:-8b}" --cache f16,q8_0,q4_0 --context 128,2k,8k,32k \
        --repetitions 5 ;;
      *) echo "cuda_check: unknown step '$s'; build, test, sanitize, time, tokens, norm, experts, attention or contexts" >&2; exit 2 ;;
    esac
  done
done
