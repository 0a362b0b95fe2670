#!/bin/bash
# Everything that is to be shown of the token runtime on one card, in calls of at most ten minutes each.
#
#   benchmarks/gpu/session.sh check      every class of model, tiny, built on the card and served: a minute at most. First
#   benchmarks/gpu/session.sh tokens     workloads A, C, B of both Qwen3 shapes with traces of steady decode, what a launch
#                                        of each size costs, then the other shapes and CSM
#   benchmarks/gpu/session.sh speech     64 texts of MMS-VITS; CSM streams, and how many at most
#   benchmarks/gpu/session.sh heard      Whisper large-v3: windows, sockets, a draft's guesses
#   benchmarks/gpu/session.sh where      no figures: where the time goes, kernel by kernel
#   benchmarks/gpu/session.sh served     8B over HTTP: start and arrivals; embeddings in process and over HTTP
#   benchmarks/gpu/session.sh correct    parity against transformers, pytest -m gpu, compute-sanitizer
#
# What matters most comes first in each; a call ends after $TOTAL seconds (570), installation included, and every figure
# is a line of JSON in $OUT (default: a new folder in /tmp) as soon as it is known; log.txt has what the steps print. A step
# that fails or takes too long does not keep the others from running; the exit status counts those steps.
#
# $WHEELS: a folder of the wheels that the machine lacks, for its Python. Beside torch, triton, transformers, tokenizers,
# numpy, pillow, safetensors, httpx, jinja2, filelock, pluggy, psutil, typer, prometheus-client and uvloop:
#
#   tokens, speech, correct   msgspec, llguidance                                                          (3.3 MB)
#   check, heard, where       the same, and silero_vad                                                      (15 MB)
#   served                    the same, and pyzmq, starlette, uvicorn, httptools, pydantic, pydantic_core,
#                     annotated_types, typing_inspection, python_multipart, websockets, setproctitle       (8.0 MB)
#
# Others in the folder are left where they are. av (35 MB) is not needed: nothing here is sound, and where it is missing
# a stand-in with its names takes its place.
#
# Each other part begins with the classes that it needs, too: a crash is known in its first seconds, by name and kernel.
#
# With --tiny each script runs small on the CPU, to see that it does; what needs a card is left out.
set -u
part=${1:?which part: check, tokens, speech, heard, where, served or correct}
tiny=${2:-}
OUT=${OUT:-$(mktemp -d)}
PYTHON=${PYTHON:-python3}
TOTAL=${TOTAL:-570}
here=$(cd "$(dirname "$0")/../.." && pwd)
cd "$here" || exit 1
mkdir -p "$OUT"

needed="msgspec llguidance"
case $part in
served)
    needed+=" pyzmq starlette uvicorn httptools pydantic pydantic_core annotated_types typing_inspection"
    needed+=" python_multipart websockets setproctitle"
    ;;
check | heard | where) needed+=" silero_vad" ;;
esac

install() {
    # the project with its entry points, beside what the machine has
    local packages wheels=() name module
    packages=$(mktemp -d)
    for name in $needed; do
        wheels+=("$WHEELS/$name"-[0-9]*.whl)
    done
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$packages" "${wheels[@]}" ||
        return 1
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --no-build-isolation \
        --target "$packages" . || return 1
    export PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH}
    if ! "$PYTHON" -c "import av" 2>/dev/null; then
        mkdir -p "$packages/av/audio" "$packages/av/video"
        for module in __init__ container filter audio/{__init__,codeccontext,frame,resampler,stream} \
            video/{__init__,frame,stream}; do
            echo 'def __getattr__(name): return type(name, (), {})' >"$packages/av/$module.py"
        done
    fi
}
[ -z "${WHEELS:-}" ] || install || exit 1
# the folder polymux here is only a part of the package: it must not hide what is installed
export PYTHONPATH=benchmarks/gpu:benchmarks${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1

failed=0
summary=""
step() { # NAME SECONDS COMMAND...
    local name=$1 seconds=$2 began=$SECONDS status=124
    shift 2
    local left=$((TOTAL - SECONDS))
    [ "$seconds" -le $left ] || seconds=$left
    echo "==== $name" >>"$OUT/log.txt"
    if [ "$seconds" -ge 15 ]; then
        timeout -k 5 "$seconds" "$@" >>"$OUT/log.txt" 2>&1
        status=$?
    else
        echo "no time was left" >>"$OUT/log.txt"
    fi
    [ $status -eq 0 ] || failed=$((failed + 1))
    summary+=$(printf '%-16s status %3d  %4d s' "$name" $status $((SECONDS - began)))$'\n'
    echo "== $name: status $status after $((SECONDS - began)) s"
    tail -n "${LINES_SHOWN:-14}" "$OUT/log.txt"
}

smoke() { # SECONDS CLASS...
    local seconds=$1
    shift
    step "smoke" "$seconds" "$PYTHON" benchmarks/gpu/smoke.py $tiny "$@"
    grep '"class"' "$OUT/log.txt" | grep -v '"status": 0' | sed 's/^/!! FAILED /'
}

results=$OUT/results.jsonl
case $part in
check)
    smoke "$([ -n "$tiny" ] && echo 560 || echo 75)"
    ;;
tokens)
    [ -n "$tiny" ] || smoke 60 llama qwen3 gemma3 moe csm
    step tokens 300 "$PYTHON" benchmarks/gpu/tokens.py A C B --models qwen3-0.6b qwen3-8b \
        --out "$results" --table "$OUT/table.md" --trace "$OUT" $tiny
    step mixed 70 "$PYTHON" benchmarks/gpu/mixed.py --model qwen3-8b --out "$OUT/mixed.jsonl" $tiny
    for model in llama-3.1-8b gemma-3-4b-text qwen3-30b-a3b; do
        step "$model" 100 "$PYTHON" benchmarks/gpu/tokens.py A C B --models $model --runs 1 \
            --out "$results" --table "$OUT/table.md" $tiny
    done
    step csm 80 "$PYTHON" benchmarks/gpu/speech.py csm --seconds 60 --out "$OUT/csm.jsonl" $tiny
    ;;
speech)
    [ -n "$tiny" ] || smoke 60 vits csm
    step speech 240 "$PYTHON" benchmarks/gpu/speech.py vits csm --out "$results" $tiny
    ;;
heard)
    [ -n "$tiny" ] || smoke 60 whisper
    step windows 90 "$PYTHON" benchmarks/gpu/recognition.py --out "$results" $tiny
    step sockets 90 "$PYTHON" benchmarks/gpu/realtime.py --out "$results" $tiny
    step guesses 90 "$PYTHON" benchmarks/gpu/recognition.py --speculation --out "$results" $tiny
    ;;
where)
    step recognition 60 "$PYTHON" benchmarks/gpu/recognition.py --runs 1 --profile "$OUT/recognition.profile" $tiny
    step reading 60 "$PYTHON" benchmarks/gpu/reading.py --out "$OUT/reading.jsonl" $tiny
    step decode 60 "$PYTHON" benchmarks/gpu/decode.py --out "$OUT/decode.jsonl" $tiny
    step mixed 70 "$PYTHON" benchmarks/gpu/mixed.py --out "$OUT/mixed.jsonl" $tiny
    step attention 60 "$PYTHON" benchmarks/gpu/attention.py --out "$OUT/attention.jsonl" $tiny
    ;;
served)
    [ -n "$tiny" ] || smoke 60 qwen3 embedder
    step online 330 "$PYTHON" benchmarks/gpu/online.py --model qwen3-8b --starts 2 --out "$results" $tiny
    for model in minilm-l6 qwen3-embedding-0.6b; do
        step "$model" 90 "$PYTHON" benchmarks/gpu/embeddings.py --model $model --out "$results" $tiny
        step "$model-http" 90 "$PYTHON" benchmarks/gpu/embeddings_http.py --model $model --out "$results" $tiny
    done
    ;;
correct)
    step check 200 "$PYTHON" benchmarks/gpu/check.py --out "$OUT/check.jsonl" $tiny
    if [ -z "$tiny" ]; then
        tests="tests/core/compute/test_triton.py tests/core/compute/test_paged.py tests/core/compute/test_triton_frames.py"
        step pytest 150 "$PYTHON" -m pytest -q -m gpu $tests
        # without torch's own allocator, so that every tensor ends where its memory does
        export PYTORCH_NO_CUDA_MEMORY_CACHING=1
        for tool in memcheck racecheck synccheck initcheck; do
            step "$tool" 100 /usr/local/cuda/bin/compute-sanitizer --tool $tool --error-exitcode 9 \
                --target-processes all "$PYTHON" benchmarks/gpu/sanitize.py
        done
    else
        step sanitize 120 env TRITON_INTERPRET=1 "$PYTHON" benchmarks/gpu/sanitize.py
    fi
    ;;
*)
    echo "unknown part: $part"
    exit 2
    ;;
esac
echo "$summary"
exit $failed
