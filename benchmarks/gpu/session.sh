#!/bin/bash
# Everything that is to be shown of the token runtime on one card, in calls of at most ten minutes each.
#
#   benchmarks/gpu/session.sh correct    pytest -m gpu, parity against transformers, compute-sanitizer
#   benchmarks/gpu/session.sh tokens     workloads A, B, C of all shapes, traces of steady decode, CSM streams
#   benchmarks/gpu/session.sh speech     64 texts of MMS-VITS; CSM streams, and how many at most
#   benchmarks/gpu/session.sh served     8B over HTTP: start and arrivals; embeddings in process and over HTTP
#
# Figures and logs go to $OUT (default: a new folder in /tmp). $WHEELS: a folder of wheels that the machine lacks.
# With --tiny each script runs small on the CPU, to see that it does; what needs a card is left out.
# A step that fails or takes too long does not keep the others from running; the exit status counts those steps.
set -u
part=${1:?which part: correct, tokens, speech or served}
tiny=${2:-}
OUT=${OUT:-$(mktemp -d)}
PYTHON=${PYTHON:-python3}
here=$(cd "$(dirname "$0")/../.." && pwd)
cd "$here" || exit 1
mkdir -p "$OUT"

if [ -n "${WHEELS:-}" ]; then
    # the project with its entry points, beside what the machine has
    packages=$(mktemp -d)
    "$PYTHON" -m pip install -q --no-index --no-deps --target "$packages" "$WHEELS"/*.whl || exit 1
    "$PYTHON" -m pip install -q --no-index --no-deps --no-build-isolation --target "$packages" . || exit 1
    export PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=benchmarks:benchmarks/gpu${PYTHONPATH:+:$PYTHONPATH}

failed=0
summary=""
step() { # NAME SECONDS COMMAND...
    local name=$1 seconds=$2 began=$SECONDS
    shift 2
    timeout -k 5 "$seconds" "$@" >"$OUT/$name.log" 2>&1
    local status=$?
    [ $status -eq 0 ] || failed=$((failed + 1))
    summary+=$(printf '%-16s status %3d  %4d s' "$name" $status $((SECONDS - began)))$'\n'
    echo "== $name: status $status"
    tail -n "${LINES_SHOWN:-12}" "$OUT/$name.log"
}

results=$OUT/results.jsonl
case $part in
correct)
    step check 200 "$PYTHON" benchmarks/gpu/check.py --out "$OUT/check.jsonl" $tiny
    if [ -z "$tiny" ]; then
        tests="tests/core/compute/test_triton.py tests/core/compute/test_paged.py"
        step pytest 200 "$PYTHON" -m pytest -q -m gpu $tests
        # without torch's own allocator, so that every tensor ends where its memory does
        export PYTORCH_NO_CUDA_MEMORY_CACHING=1
        for tool in memcheck racecheck initcheck synccheck; do
            step "$tool" 120 /usr/local/cuda/bin/compute-sanitizer --tool $tool --error-exitcode 9 \
                --target-processes all "$PYTHON" benchmarks/gpu/sanitize.py
        done
    else
        step sanitize 120 env TRITON_INTERPRET=1 "$PYTHON" benchmarks/gpu/sanitize.py
    fi
    ;;
tokens)
    step tokens 480 "$PYTHON" benchmarks/gpu/tokens.py --out "$results" --table "$OUT/table.md" --trace "$OUT" $tiny
    step csm 110 "$PYTHON" benchmarks/gpu/speech.py csm --seconds 80 --out "$OUT/csm.jsonl" $tiny
    ;;
speech)
    step speech 240 "$PYTHON" benchmarks/gpu/speech.py vits csm --out "$results" $tiny
    ;;
served)
    step online 330 "$PYTHON" benchmarks/gpu/online.py --model qwen3-8b --starts 2 --out "$results" $tiny
    for model in minilm-l6 qwen3-embedding-0.6b; do
        step "$model" 60 "$PYTHON" benchmarks/gpu/embeddings.py --model $model --out "$results" $tiny
        step "$model-http" 70 "$PYTHON" benchmarks/gpu/embeddings_http.py --model $model --out "$results" $tiny
    done
    ;;
*)
    echo "unknown part: $part"
    exit 2
    ;;
esac
echo "$summary"
exit $failed
