#!/usr/bin/env bash
# Loads a server that is not ours with `anabranch bench serve` and with guidellm in turn: their figures must agree.
#
#   scripts/clients/foreign_server.sh OUT
#
# The server is `transformers serve` on a CPU with a tiny Kimi-Linear checkpoint, in a virtual environment of its own
# (2 GB); guidellm has another (1.5 GB). Both send the same prompts, one at a time. OUT is a directory. Exit status 0
# only if every request was answered, both counted the same tokens, and mean time to first token, mean latency and
# tokens a second differ by no more than 3 % or the spread of our own rounds, whichever is larger.
# Environment: VENVS (~/.cache/anabranch), PORT (8017), ROUNDS (3), REQUESTS (20), PYTHON (python3).
set -euo pipefail

if [ $# -ne 1 ]; then
  echo "usage: $0 OUT" >&2
  exit 2
fi
out=$1 venvs=${VENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/anabranch}
port=${PORT:-8017} rounds=${ROUNDS:-3} requests=${REQUESTS:-20} python=${PYTHON:-python3}
url=http://127.0.0.1:$port
here=$(cd "$(dirname "$0")" && pwd)
anabranch=$here/../../.venv/bin/anabranch
mkdir -p "$out"

install() { # name, packages
  [ -x "$venvs/$1/bin/$1" ] && return
  "$python" -m venv "$venvs/$1"
  "$venvs/$1/bin/pip" install --quiet "${@:2}" "torch<2.14" # below 2.14 pip takes a CPU build where one is offered
}
install transformers "transformers[serving]>=5.24,<6" accelerate
install guidellm "guidellm==0.8.1"

export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
model=$out/tiny-kl
[ -d "$model" ] || "$anabranch" init-checkpoint kl --out "$model"
"$python" - "$out/prompts.jsonl" "$requests" <<'PYTHON'
import json
import random
import sys

words = "river stream bank water stone bridge field cloud morning evening light wind tree house road".split()
rng = random.Random(0)
with open(sys.argv[1], "w", encoding="utf-8") as file:
    for _ in range(int(sys.argv[2])):
        file.write(json.dumps({"prompt": " ".join(rng.choice(words) for _ in range(30))}) + "\n")
PYTHON

"$venvs/transformers/bin/transformers" serve "$model" --port "$port" --device cpu > "$out/server.log" 2>&1 &
server=$!
trap 'kill $server; wait $server 2> /dev/null || true' EXIT
for _ in $(seq 120); do
  curl -sf "$url/health" > "$out/health" && break
  kill -0 $server # it may have ended
  sleep 1
done

ours() {
  "$anabranch" bench serve --base-url "$url" --dataset-name custom --dataset-path "$out/prompts.jsonl" \
    --custom-output-len 32 --num-prompts "$requests" --max-concurrency 1 --no-ignore-eos --result-filename "$1"
}
ours "$out/warm-up.json" > /dev/null
for round in $(seq "$rounds"); do
  # without a number of tokens in the data guidellm does not send ignore_eos, which this server refuses
  "$venvs/guidellm/bin/guidellm" run \
    --backend "kind=openai_http,target=$url,request_format=/v1/completions,max_tokens=32" \
    --profile "kind=concurrent,streams=1" --constraint "kind=max_requests,count=$requests" \
    --tokenizer "kind=hf_auto,model=$model" --data "kind=json_file,path=$out/prompts.jsonl" \
    --output "kind=json,path=$out/guidellm-$round.json" > "$out/guidellm-$round.log" 2>&1
  ours "$out/ours-$round.json" > /dev/null
done

"$python" - "$out" "$rounds" "$requests" <<'PYTHON'
import json
import sys
from statistics import mean

out, rounds, requests = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def read(name):
    with open(f"{out}/{name}.json", encoding="utf-8") as file:
        return json.load(file)


def guidellm(round):
    (found,) = read(f"guidellm-{round}")["benchmarks"]
    done, metrics = found["requests"]["successful"], found["metrics"]
    seconds = mean(r["request_latency"] for r in done)
    tokens = sum(r["output_tokens"] for r in done)
    first = metrics["time_to_first_token_ms"]["successful"]["mean"]
    return {"requests": len(done), "tokens": tokens, "ttft ms": first, "latency ms": seconds * 1e3,
            "tokens/s": tokens / (seconds * len(done))}  # fmt: skip


def ours(round):
    found = read(f"ours-{round}")
    seconds = found["mean_e2el_ms"] / 1e3
    return {"requests": found["completed"], "tokens": found["total_output_tokens"], "ttft ms": found["mean_ttft_ms"],
            "latency ms": seconds * 1e3, "tokens/s": found["total_output_tokens"] / (seconds * found["completed"])}  # fmt: skip


pairs = [(guidellm(r), ours(r)) for r in range(1, rounds + 1)]
faults = [f"{key}: {a[key]} and {b[key]}" for a, b in pairs for key in ("requests", "tokens") if a[key] != b[key]]
faults += [f"{b['requests']} of {requests} requests answered" for _, b in pairs if b["requests"] != requests]
for key in ("ttft ms", "latency ms", "tokens/s"):
    theirs, mine = [a[key] for a, _ in pairs], [b[key] for _, b in pairs]
    spread = (max(mine) - min(mine)) / mean(mine) * 100
    apart = abs(mean(mine) / mean(theirs) - 1) * 100
    print(f"{key:10s} guidellm {mean(theirs):8.1f}  ours {mean(mine):8.1f}  apart {apart:4.1f} %  spread {spread:4.1f} %")
    if apart > max(3.0, spread):
        faults.append(f"{key}: {apart:.1f} % apart, spread {spread:.1f} %")
if faults:
    sys.exit("FAILED: " + "; ".join(faults))
print(f"ok: {pairs[0][0]['tokens']} tokens in each of {rounds} rounds")
PYTHON
