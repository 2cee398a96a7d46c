#!/usr/bin/env bash
# One GPU, about ten minutes: every candidate is compared with float64 before it is timed.
#     pip install -e '.[gpu,bench]' && pip install tokamax && experiments/bench/gpu.sh
# Not run yet: no GPU was at hand when it was written.
set -euo pipefail
cd "$(dirname "$0")/../.."
export XLA_PYTHON_CLIENT_PREALLOCATE=false # torch computes in the same process
out=(--out "${1:-runs/gpu}")

python run.py bench loss --tokens 4096 --width 4096 --vocab 128256 --dtype bfloat16 "${out[@]}" # target: 1.15 F
python run.py bench sparse "${out[@]}" # up to 410M parameters
python run.py bench step --vocab 100352 --width 1024 --layers 8 "${out[@]}"
# Where a step's time goes; the table is in runs/profiled/profile/operations.txt.
python run.py train untied --vocab.dtype bfloat16 --optim.embed.sparse catch_up --train.steps 20 --profile --name profiled
