#!/usr/bin/env bash
# Trains starter/see and starter/look one beside the other on one GPU, and packs what comes out.
#   OUT=/tmp/out LIMIT=520 plugins/starter/train/seeing.sh [what all recipes are told, such as --small --device cpu]
# After LIMIT seconds what is not done stops and packs its state instead: unpack that and run again with RESUME=folder.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python3}
OUT=${OUT:?the folder for what is made}
mkdir -p "$OUT"
LIMIT=${LIMIT:-520}
WORK=${WORK:-$(mktemp -d)}
BEGUN=$SECONDS

left() { echo $((LIMIT - SECONDS + BEGUN)); }

if [ -n "${RESUME:-}" ]; then
  cp "$RESUME/eye.safetensors" "$WORK/"
else
  "$PYTHON" "$HERE/eye.py" --out "$WORK/eye" --seconds "$(left)" "$@"
  cp "$WORK/eye/eye.safetensors" "$WORK/"
fi
cp "$WORK/eye.safetensors" "$OUT/"

one() {
  local name=$1
  shift
  local state=()
  if [ -n "${RESUME:-}" ] && [ -d "$RESUME/$name/model" ]; then
    tar -C "$RESUME" -cf "$OUT/$name.tar" "$name"
    return
  fi
  if [ -n "${RESUME:-}" ] && [ -f "$RESUME/$name/weights.safetensors" ]; then state=(--resume "$RESUME/$name"); fi
  "$PYTHON" "$HERE/$name.py" --out "$WORK/$name" --eye "$WORK/eye.safetensors" --seconds "$(left)" "${state[@]}" "$@" \
    > "$WORK/$name.out" 2>&1 || { tail -n 20 "$WORK/$name.out"; return 1; }
  tail -n 1 "$WORK/$name/log.jsonl"
  tar -C "$WORK" -cf "$OUT/$name.tar" "$name"
}

one see "$@" & SEE=$!
one look "$@" & LOOK=$!
FAILED=0
wait $SEE || FAILED=1
wait $LOOK || FAILED=1
ls -l "$OUT"
exit $FAILED
