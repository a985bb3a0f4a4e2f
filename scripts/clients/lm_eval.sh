#!/usr/bin/env bash
# Scores a running server on GSM8K with lm-eval, an independent evaluator, in a virtual environment of its own (0.8 GB).
#
#   anabranch serve tiny-k3 &
#   scripts/clients/lm_eval.sh http://127.0.0.1:8000 tiny-k3 tiny-k3 test.jsonl lm-eval-out
#
# MODEL is the served name, TOKENIZER a directory with tokenizer.json, DATA the test set of GSM8K as JSON lines with
# `question` and `answer`, OUT a directory. Two tasks: `gsm8k_local` generates answers; `gsm8k_likelihood` scores the
# reference answers, which needs `echo` with `logprobs`. A random checkpoint scores 0: it shows that the plumbing holds.
# Environment: VENV (.venv-lm-eval), LIMIT (20 items), CONCURRENT (4), PYTHON (python3).
set -euo pipefail

if [ $# -ne 5 ]; then
  echo "usage: $0 URL MODEL TOKENIZER DATA.jsonl OUT" >&2
  exit 2
fi
url=$1 model=$2 tokenizer=$(realpath "$3") data=$(realpath "$4") out=$5
venv=${VENV:-.venv-lm-eval}

if [ ! -x "$venv/bin/lm_eval" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install --quiet "lm-eval[api]==0.4.13" transformers
fi

tasks=$(mktemp -d)
trap 'rm -r "$tasks"' EXIT
cat > "$tasks/gsm8k_local.yaml" <<YAML
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
cat > "$tasks/gsm8k_likelihood.yaml" <<YAML
task: gsm8k_likelihood
dataset_path: json
dataset_kwargs: {data_files: {test: "$data"}}
test_split: test
output_type: loglikelihood
doc_to_text: "Question: {{question}}\nAnswer:"
doc_to_target: " {{answer}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
YAML

export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
common="model=$model,base_url=$url/v1/completions,num_concurrent=${CONCURRENT:-4},max_retries=1"
"$venv/bin/lm_eval" run --model local-completions --tasks gsm8k_local --include_path "$tasks" \
  --model_args "$common,tokenized_requests=False,tokenizer_backend=None" --limit "${LIMIT:-20}" --output_path "$out"
"$venv/bin/lm_eval" run --model local-completions --tasks gsm8k_likelihood --include_path "$tasks" \
  --model_args "$common,tokenized_requests=True,tokenizer_backend=huggingface,tokenizer=$tokenizer" \
  --limit "${LIMIT:-20}" --output_path "$out"
