#!/usr/bin/env bash
# Measures a running server with guidellm, an independent load generator, in a virtual environment of its own (1.5 GB).
#
#   anabranch serve tiny-k3 &
#   scripts/clients/guidellm.sh http://127.0.0.1:8000 tiny-k3 guidellm.json
#
# TOKENIZER is a directory with tokenizer.json, usually the checkpoint; OUT takes the report as JSON. Exit status 0 only
# if every request was answered with exactly OUTPUT_TOKENS tokens.
# Environment: VENV (~/.cache/anabranch/guidellm), FORMAT (/v1/completions; with /v1/chat/completions every prompt grows
# by the format of a conversation), STREAMS (2), REQUESTS (10), PROMPT_TOKENS (40), OUTPUT_TOKENS (8), PYTHON (python3).
set -euo pipefail

if [ $# -ne 3 ]; then
  echo "usage: $0 URL TOKENIZER OUT.json" >&2
  exit 2
fi
url=$1 tokenizer=$(realpath -e "$2") out=$3
venv=${VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/anabranch/guidellm}
requests=${REQUESTS:-10} output_tokens=${OUTPUT_TOKENS:-8}

if [ ! -x "$venv/bin/guidellm" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
  # guidellm imports torch for nothing that is used here: below 2.14 pip takes a CPU build where one is offered
  "$venv/bin/pip" install --quiet "guidellm==0.8.1" "torch<2.14"
fi

rm -f "$out"  # what is checked below must be from this run
# the tokenizer is a local directory: nothing is fetched
export HF_HUB_OFFLINE=1
"$venv/bin/guidellm" run \
  --backend "kind=openai_http,target=$url,request_format=${FORMAT:-/v1/completions}" \
  --profile "kind=concurrent,streams=${STREAMS:-2}" \
  --constraint "kind=max_requests,count=$requests" \
  --tokenizer "kind=hf_auto,model=$tokenizer" \
  --data "kind=synthetic_text,prompt_tokens=${PROMPT_TOKENS:-40},output_tokens=$output_tokens" \
  --output "kind=json,path=$out"

# guidellm itself is content with failed requests
"$venv/bin/python" - "$out" "$requests" "$output_tokens" <<'PYTHON'
import json
import sys

path, requests, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with open(path, encoding="utf-8") as file:
    (benchmark,) = json.load(file)["benchmarks"]
totals = benchmark["metrics"]["request_totals"]
if totals["successful"] != requests or totals["total"] != requests:
    sys.exit(f"FAILED: {totals}; need {requests} successful requests and no others")
counts = sorted({request["output_tokens"] for request in benchmark["requests"]["successful"]})
if counts != [tokens]:
    sys.exit(f"FAILED: answers of {counts} tokens; need {tokens}")
print(f"ok: {requests} requests, {tokens} tokens each")
PYTHON
