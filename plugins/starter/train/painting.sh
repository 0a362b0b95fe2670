#!/usr/bin/env bash
# Trains starter/paint and starter/film one beside the other on one GPU, or one alone, and packs the folders.
#   OUT=/tmp/out plugins/starter/train/painting.sh [what both recipes are told, such as --small --device cpu]
# MINUTES bound VAE and flow together, where a recipe's own (20 for paint, 7 for film) are too many; compiling, drawing and
# encoding take about one more. A folder is packed anew whenever a recipe has written it, so a call that is cut off leaves
# the newest whole one.
# ONLY=paint leaves film out. RESUME=DIR goes on from DIR/paint and DIR/film, their VAEs as they are.
# TORCHDYNAMO_DISABLE=1 compiles nothing, should the compiler fail; --eager records nothing either.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:?the folder for what is made}
WORK=${WORK:-$(mktemp -d)}

pack() {  # the report is written last: a folder with a newer one is whole
  local name=$1
  [ -f "$WORK/$name/training.json" ] || return 0
  if [ ! -f "$OUT/$name.tar" ] || [ "$WORK/$name/training.json" -nt "$OUT/$name.tar" ]; then
    tar -C "$WORK" -cf "$OUT/.$name.tar" "$name" && mv "$OUT/.$name.tar" "$OUT/$name.tar"
  fi
}

one() {
  local name=$1 told=()
  shift
  if [ -n "${MINUTES:-}" ]; then told+=(--minutes "$MINUTES"); fi
  if [ -n "${RESUME:-}" ]; then told+=(--resume "$RESUME/$name"); fi
  "${PYTHON:-python3}" "$HERE/$name.py" --out "$WORK/$name" "${told[@]}" "$@" > "$OUT/$name.log" 2>&1 &
  local run=$!
  while kill -0 $run 2> /dev/null; do
    sleep 5
    pack "$name"
  done
  wait $run || { tail -n 20 "$OUT/$name.log"; return 1; }
  pack "$name"
  grep '"run"' "$OUT/$name.log" | tail -n 3
}

RUNS=()
for name in ${ONLY:-paint film}; do
  one "$name" "$@" &
  RUNS+=($!)
done
STATUS=0
for run in "${RUNS[@]}"; do wait "$run" || STATUS=1; done
ls -l "$OUT"
exit $STATUS
