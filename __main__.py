"""`python -m paramserver`: names the programs. `python -m paramserver.launch` is one of them."""

import sys

print("paramserver has programs, each with --help:", file=sys.stderr)
for name, does in {
    "ps-launch": "trains: ps-launch -n 4 train.py, or ps-launch FILE.yaml",
    "ps-runs": "lists, shows and compares runs",
    "ps-server, ps-worker": "are one process each, where nothing starts them together",
    "ps-serve": "replies to requests with a model",
    "ps-sim, ps-bench, ps-certs": "simulate, measure, make certificates",
}.items():
    print(f"  {name:27} {does}", file=sys.stderr)
sys.exit(2)
