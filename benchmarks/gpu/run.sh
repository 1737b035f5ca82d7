#!/usr/bin/env bash
# One part of what a GPU machine answers, each within 8 minutes; README.md says what they write.
#   benchmarks/gpu/run.sh PART [ARGUMENTS]     PART: setup probe test sanitize vmm kernels compile engine
# PYTHON chooses the interpreter (default: .venv/bin/python if there is one, else python3), RESULTS the
# folder (default: $OUT, else benchmarks/gpu/results/<date>-<device>).
set -euo pipefail
cd "$(dirname "$0")/../.."
part="${1:-}"
[ $# -gt 0 ] && shift
python="${PYTHON:-}"
if [ -z "$python" ]; then
  python=python3
  [ -x .venv/bin/python ] && python=.venv/bin/python
fi
device() {
  nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr -cs 'A-Za-z0-9' '-' |
    sed 's/-$//' | tr 'A-Z' 'a-z'
}
found="$(device || true)"
results="${RESULTS:-${OUT:-benchmarks/gpu/results/$(date +%F)-${found:-no-gpu}}}"
# A part that is stuck must not take the machine with it.
limited() { timeout --signal=INT --kill-after=10 "${LIMIT:-470}" "$@"; }
script() {
  if [ ! -f "$1" ]; then
    echo "$1 is not in this checkout" >&2
    exit 2
  fi
  limited "$python" "$@"
}
if [ -n "$part" ]; then mkdir -p "$results/$part"; fi
case "$part" in
  setup)
    "$python" -m pip install --no-build-isolation --no-deps -e .
    "$python" -c 'import torch, vmserve; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())'
    ;;
  probe) script benchmarks/gpu/probe.py --out "$results/probe" --budget-seconds 440 "$@" ;;
  test)
    limited "$python" -m pytest -m gpu tests/gpu -p no:cacheprovider \
      --junitxml="$results/test/results.xml" "$@" 2>&1 | tee "$results/test/test.log"
    ;;
  sanitize)
    # memcheck over the tests of our kernels and of the engine; slow, so only those named here.
    limited compute-sanitizer --tool memcheck --error-exitcode 9 --target-processes all \
      "$python" -m pytest -m gpu tests/gpu -p no:cacheprovider -k "${SANITIZE:-backends or tenant}" \
      "$@" 2>&1 | tee "$results/sanitize/sanitize.log"
    ;;
  vmm) limited "$python" -c 'from vmserve.cli import main; main()' bench alloc --driver cuda \
    --json "$results/vmm/results.json" --markdown "$results/vmm/vmm.md" "$@" ;;
  kernels)
    # The budget is each of its parts'.
    script benchmarks/gpu/kernels.py --out "$results/kernels/results.json" --budget-seconds 210 "$@"
    ;;
  compile) script benchmarks/gpu/compile_matrix.py --out "$results/compile/results.json" "$@" ;;
  engine) script benchmarks/gpu/engine.py --out "$results/engine" "$@" ;;
  *)
    sed -n '2,5p' "$0" >&2
    exit 2
    ;;
esac
echo "results: $results/$part" >&2
