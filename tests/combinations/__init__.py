"""Rows of options that cover every promised pair, run with real processes and judged without the product's own claims.

make combinations SEED=1              a covering array; each row that fails is reduced to its fewest options
python -m paramserver.tests.combinations --row '{"mode": "async", "fault": "kill_worker"}'
"""
