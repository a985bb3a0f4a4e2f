#!/usr/bin/env bash
# Measures a running server with guidellm, an independent load generator, in a virtual environment of its own (1.5 GB).
#
#   anabranch serve tiny-k3 &
#   scripts/clients/guidellm.sh http://127.0.0.1:8000 tiny-k3 guidellm.json
#
# TOKENIZER is a directory with tokenizer.json, usually the checkpoint; OUT takes the report as JSON.
# Environment: VENV (.venv-guidellm), STREAMS (2), REQUESTS (10), PROMPT_TOKENS (40), OUTPUT_TOKENS (8), PYTHON (python3).
set -euo pipefail

if [ $# -ne 3 ]; then
  echo "usage: $0 URL TOKENIZER OUT.json" >&2
  exit 2
fi
url=$1 tokenizer=$(realpath "$2") out=$3
venv=${VENV:-.venv-guidellm}

if [ ! -x "$venv/bin/guidellm" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install --quiet "guidellm==0.8.1"
fi

# the tokenizer is a local directory: nothing is fetched
export HF_HUB_OFFLINE=1
"$venv/bin/guidellm" run \
  --backend "kind=openai_http,target=$url" \
  --profile "kind=concurrent,streams=${STREAMS:-2}" \
  --constraint "kind=max_requests,count=${REQUESTS:-10}" \
  --tokenizer "kind=hf_auto,model=$tokenizer" \
  --data "kind=synthetic_text,prompt_tokens=${PROMPT_TOKENS:-40},output_tokens=${OUTPUT_TOKENS:-8}" \
  --output "kind=json,path=$out"
