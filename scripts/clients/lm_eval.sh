#!/usr/bin/env bash
# Scores a running server on GSM8K with lm-eval, an independent evaluator, in a virtual environment of its own (1.8 GB).
#
#   anabranch serve tiny-k3 &
#   scripts/clients/lm_eval.sh http://127.0.0.1:8000 tiny-k3 tiny-k3 test.jsonl lm-eval-out
#
# MODEL is the served name, TOKENIZER a directory with tokenizer.json, DATA the test set of GSM8K as JSON lines with
# `question` and `answer`, OUT a directory. Three tasks: `gsm8k_local` generates answers; `gsm8k_likelihood` scores the
# reference answers, and `gsm8k_bits` whole items, which need `echo` with `logprobs`. A random checkpoint scores near 0
# and needs log2(vocabulary) bits or more for each token: it shows that the plumbing holds. Exit status 0 only if every
# item was scored.
# Environment: VENV (~/.cache/anabranch/lm-eval), LIMIT (20 items), CONCURRENT (4), PYTHON (python3).
set -euo pipefail

if [ $# -ne 5 ]; then
  echo "usage: $0 URL MODEL TOKENIZER DATA.jsonl OUT" >&2
  exit 2
fi
url=$1 model=$2 tokenizer=$(realpath -e "$3") data=$(realpath -e "$4") out=$5
venv=${VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/anabranch/lm-eval}
limit=${LIMIT:-20}

if [ ! -x "$venv/bin/lm_eval" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
  # torch is not used here: below 2.14 pip takes a CPU build where one is offered
  "$venv/bin/pip" install --quiet "lm-eval[api]==0.4.13" transformers "torch<2.14"
fi

scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT
mkdir "$scratch/tasks"
cat > "$scratch/tasks/gsm8k_local.yaml" <<YAML
task: gsm8k_local
dataset_path: json
dataset_kwargs: {data_files: {test: "$data"}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{question}}\nAnswer:"
doc_to_target: "{{answer.split('#### ')[-1]}}"
generation_kwargs: {until: ["Question:"], do_sample: false, temperature: 0.0, max_gen_toks: 256}
filter_list:
  - name: flexible-extract
    filter:
      - {function: regex, group_select: -1, regex_pattern: "(-?[\$0-9.,]{2,})|(-?[0-9]+)"}
      - {function: take_first}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, regexes_to_ignore: [",", "\\\\\$", "\\\\.\$"]}
YAML
cat > "$scratch/tasks/gsm8k_likelihood.yaml" <<YAML
task: gsm8k_likelihood
dataset_path: json
dataset_kwargs: {data_files: {test: "$data"}}
test_split: test
output_type: loglikelihood
doc_to_text: "Question: {{question}}\nAnswer:"
doc_to_target: " {{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
YAML
cat > "$scratch/tasks/gsm8k_bits.yaml" <<YAML
task: gsm8k_bits
dataset_path: json
dataset_kwargs: {data_files: {test: "$data"}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "Question: {{question}}\nAnswer: {{answer}}"
metric_list:
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
YAML

export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
common="model=$model,base_url=$url/v1/completions,num_concurrent=${CONCURRENT:-4},max_retries=1"
generated="$common,tokenized_requests=False,tokenizer_backend=None"
scored="$common,tokenized_requests=True,tokenizer_backend=huggingface,tokenizer=$tokenizer"
run() {
  "$venv/bin/lm_eval" run --model local-completions --include_path "$scratch/tasks" --limit "$limit" --log_samples \
    --output_path "$scratch/out" "$@"
}
run --tasks gsm8k_local --model_args "$generated"
run --tasks gsm8k_likelihood,gsm8k_bits --model_args "$scored"

"$venv/bin/python" - "$scratch/out" "$data" "$limit" <<'PYTHON'
import json
import math
import sys
from pathlib import Path

out, data, limit = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
wanted = min(limit, sum(1 for line in data.open(encoding="utf-8") if line.strip()))
results, items = {}, 0
for path in out.rglob("results_*.json"):
    results |= json.loads(path.read_text(encoding="utf-8"))["results"]
for path in out.rglob("samples_*.jsonl"):
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if len(lines) != wanted:
        sys.exit(f"FAILED: {len(lines)} items in {path.name}; need {wanted}")
    items += len(lines)
    for line in lines:
        (reply,) = line["resps"][0]
        if "likelihood" in path.name:
            value = float(reply[0] if isinstance(reply, list) else reply)
            if not (math.isfinite(value) and value < 0):
                sys.exit(f"FAILED: log-likelihood {value} in {path.name}")
if set(results) != {"gsm8k_local", "gsm8k_likelihood", "gsm8k_bits"} or items != 3 * wanted:
    sys.exit(f"FAILED: {items} items of {sorted(results)}; need {wanted} of each of the three tasks")
bits = results["gsm8k_bits"]["bits_per_byte,none"]
if not (math.isfinite(bits) and bits > 0):
    sys.exit(f"FAILED: {bits} bits per byte")
score = results["gsm8k_local"]["exact_match,flexible-extract"]
print(f"ok: {wanted} items, exact match {score:g}, {bits:.3f} bits per byte")
PYTHON
mkdir -p "$out"
cp -r "$scratch/out/." "$out"
