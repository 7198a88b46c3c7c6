#!/usr/bin/env bash
# Everything that is checked and measured on two GPUs, in one go; results under $OUT.
set -u
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
OUT=${OUT:-benchmarks/results}
python3 -m pytest -q -x -m gpu tests -p no:cacheprovider 2>&1 | tail -40
python3 benchmarks/overhead.py --size 1b --seq 4096 --batch 4 --vocabulary 32768 --steps 12 --out "$OUT/overhead-1b.json" 2>&1 | tail -30
