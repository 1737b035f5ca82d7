#!/usr/bin/env bash
# One part of what a GPU machine answers, each within 8 minutes; README.md says what they write.
#   benchmarks/gpu/run.sh pack                 elsewhere, before: the compiled core for setup, into .gpu
#   benchmarks/gpu/run.sh PART [ARGUMENTS]     PART: setup smoke probe test sanitize vmm kernels compile engine serve
#   benchmarks/gpu/run.sh each "PART[@SECONDS] ARGUMENTS"...     one after the other, packed into one archive
# PYTHON chooses the interpreter (default: .venv/bin/python if there is one, else python3), RESULTS the
# folder (default: $OUT, else benchmarks/gpu/results/<date>-<device>), WHEELS where setup finds packages
# (.whl), LIMIT the seconds of a part (470), TOTAL those of each (570).
set -euo pipefail
cd "$(dirname "$0")/../.."
part="${1:-}"
if [ $# -gt 0 ]; then shift; fi
python="${PYTHON:-}"
if [ -z "$python" ]; then
  python=python3
  [ -x .venv/bin/python ] && python=.venv/bin/python
fi
export PYTHONUNBUFFERED=1
limit="${LIMIT:-470}"
device() {
  nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr -cs 'A-Za-z0-9' '-' |
    sed 's/-$//' | tr 'A-Z' 'a-z'
}
found="$(device || true)"
results="${RESULTS:-${OUT:-benchmarks/gpu/results/$(date +%F)-${found:-no-gpu}}}"
left() { echo $((limit > SECONDS + 5 ? limit - SECONDS : 5)); }
# A part that is stuck must not take the machine with it.
limited() { timeout --signal=INT --kill-after=10 "$(left)" "$@"; }
script() {
  if [ ! -f "$1" ]; then
    echo "$1 is not in this checkout" >&2
    exit 2
  fi
  limited "$python" "$@"
}
# Warnings of other versions than those that the project is tested with are no failures here. A test
# that is stuck in a call ends its process.
pytest() {
  limited "$python" -m pytest -m gpu tests/gpu -p no:cacheprovider -W default \
    -o timeout_method=thread "$@"
}
# The compiled core of this interpreter, and what it is made of.
core() { echo "_core$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"; }
sources() {
  find CMakeLists.txt csrc drivers_ext/include -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum |
    sha256sum | cut -d ' ' -f 1
}
# What setup puts here serves without an installation.
here() { export PYTHONPATH="$PWD:$PWD/bench:$PWD/.site${PYTHONPATH:+:$PYTHONPATH}"; }
if [ -e .site ] || compgen -G 'vmserve/_core*.so' >/dev/null; then here; fi
# Puts the core that pack made into its place, if it is for this interpreter and these sources.
take_core() {
  local name
  name="$(core)"
  if [ ! -e ".gpu/$name" ]; then
    echo ".gpu has no $name: it is built here" >&2
    return 1
  fi
  if [ -e .gpu/sources ] && [ "$(cat .gpu/sources)" != "$(sources)" ]; then
    echo ".gpu/$name is of other sources: it is built here" >&2
    return 1
  fi
  cp ".gpu/$name" vmserve/
  if ! "$python" -c 'import vmserve._core'; then
    echo ".gpu/$name does not load: it is built here" >&2
    rm "vmserve/$name"
    return 1
  fi
}
case "$part" in '' | each | pack | setup) ;; *) mkdir -p "$results/$part" ;; esac
case "$part" in
  pack)
    # Its interpreter must be of the machine's version, and have scikit-build-core, pybind11, cmake and ninja.
    work="$(mktemp -d)"
    "$python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$work" .
    "$python" -m zipfile -e "$work"/*.whl "$work/wheel"
    mkdir -p .gpu
    cp "$work/wheel/vmserve/$(core)" .gpu/
    sources >.gpu/sources
    rm -r "$work"
    ls -l .gpu
    exit
    ;;
  setup)
    wheels=("${WHEELS:-.whl}"/*.whl)
    if [ -e "${wheels[0]}" ]; then
      "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$PWD/.site" "${wheels[@]}"
    fi
    here
    take_core || "$python" -m pip install --no-build-isolation --no-deps -e . -e ./bench
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit,memory.used \
      --format=csv 2>/dev/null || true
    "$python" -c 'import torch, vmserve._core; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())'
    exit
    ;;
  smoke)
    # Whether anything works at all: the driver, kernels against float64, tokens by captured and eager steps.
    status=0
    pytest --timeout 60 --maxfail 5 -k "${SMOKE:-test_driver or (test_backends and bfloat16)}" \
      --junitxml="$results/smoke/results.xml" 2>&1 | tee "$results/smoke/smoke.log" || status=$?
    script benchmarks/gpu/engine.py --out "$results/smoke" --shape llama-3.2-1b --parts smoke,auto \
      --seconds "$(($(left) - 20))" "$@" || status=$?
    exit "$status"
    ;;
  probe) script benchmarks/gpu/probe.py --out "$results/probe" --budget-seconds "$(($(left) - 25))" "$@" ;;
  test)
    # A process that has lost the device, or died, tells nothing more: another one goes on behind that test.
    progress="$results/test/progress"
    rm -f "$progress"
    status=0
    for attempt in 1 2 3 4 5 6 7 8; do
      ended=0
      pytest --timeout 60 --gpu-tests-progress "$progress" \
        --junitxml="$results/test/results-$attempt.xml" "$@" 2>&1 |
        tee "$results/test/test-$attempt.log" || ended=$?
      # 5: no test is left
      if [ "$ended" -ne 0 ] && [ "$ended" -ne 5 ]; then status=$ended; fi
      if grep -qsx 'all told' "$progress" || [ "$(left)" -lt 30 ]; then break; fi
    done
    exit "$status"
    ;;
  sanitize)
    # memcheck over tests of our kernels and of the memory; slow, so only those named here.
    sanitizer="$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)"
    limited "$sanitizer" --tool memcheck --error-exitcode 9 --target-processes all \
      "$python" -m pytest -m gpu tests/gpu -p no:cacheprovider -W default --timeout 0 \
      -k "${SANITIZE:-tenant or (backends and bfloat16 and 8-None)}" \
      "$@" 2>&1 | tee "$results/sanitize/sanitize.log"
    ;;
  vmm) limited "$python" -m vmserve_bench alloc --driver cuda \
    --json "$results/vmm/results.json" --markdown "$results/vmm/vmm.md" "$@" ;;
  kernels)
    # The budget is each of its parts'.
    script benchmarks/gpu/kernels.py --out "$results/kernels/results.json" \
      --budget-seconds "$((($(left) - 50) / 2))" "$@"
    ;;
  serve) script benchmarks/gpu/serve.py --out "$results/serve" "$@" ;;
  compile) script benchmarks/gpu/compile_matrix.py --out "$results/compile/results.json" "$@" ;;
  engine)
    # The same: what had begun is left out, and the rest is done in another process.
    resume=()
    for _ in 1 2 3 4; do
      status=0
      script benchmarks/gpu/engine.py --out "$results/engine" --seconds "$(($(left) - 50))" \
        "${resume[@]}" "$@" || status=$?
      # 0 and 1: it came to its end; 2: wrong arguments
      if [ "$status" -le 2 ] || [ "$(left)" -lt 80 ]; then break; fi
      resume=(--resume)
    done
    exit "$status"
    ;;
  each)
    # Whatever becomes of one, the others run. From some machines few files come back: the archive has all,
    # and is whole after each part.
    work="$(mktemp -d)"
    total="${TOTAL:-570}"
    mkdir -p "$results"
    failed=0
    number=0
    for words in "$@"; do
      number=$((number + 1))
      mapfile -t command < <(xargs printf '%s\n' <<<"$words") # quotes hold words together
      most="$limit"
      if [[ ${command[0]} == *@* ]]; then
        most="${command[0]#*@}"
        command[0]="${command[0]%@*}"
      fi
      rest=$((total - SECONDS - 15))
      if [ "$rest" -lt 30 ]; then
        echo "== $words: no time was left"
        failed=1
        continue
      fi
      echo "== $words"
      ended=0
      LIMIT=$((rest < most ? rest : most)) RESULTS="$work/$number" \
        benchmarks/gpu/run.sh "${command[@]}" >"$work/$number-${command[0]}.log" 2>&1 || ended=$?
      tail -n "${LINES_OF_EACH:-20}" "$work/$number-${command[0]}.log"
      echo "== $words: exit status $ended, after $SECONDS s in all"
      [ "$ended" -eq 0 ] || failed=1
      tar -czf "$results/results.tar.gz.part" -C "$work" .
      mv "$results/results.tar.gz.part" "$results/results.tar.gz"
    done
    rm -r "$work"
    exit "$failed"
    ;;
  *)
    sed -n '2,8p' benchmarks/gpu/run.sh >&2
    exit 2
    ;;
esac
echo "results: $results/$part" >&2
