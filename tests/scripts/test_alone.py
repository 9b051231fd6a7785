"""A script alone is the same script in sync with one worker: its weights, refusals, exit code, hooks and counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paramserver.tests.cluster import Cluster, Process

BEFORE = """
import sys
from itertools import islice

import torch
from torch.utils.data import DataLoader, TensorDataset

import paramserver

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
model, x = model.double(), torch.randn(40, 8).double()
data, seen = TensorDataset(x), []


def backward(batch, factor=1.0):
    loss = (model(batch) * factor).square().mean()
    loss.backward()
    return loss.item()


def join(inner=None, **options):
    optimizer = session.optimizer(model, inner or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options)
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    return optimizer


def keep():
    torch.save({"weights": model.state_dict(), "seen": seen, "step": session.step, "done": session.is_done}, OUT)


session = paramserver.connect()
"""
AFTER = """
session.finish()
keep()
if hasattr(session, "alone"):
    print("samples", session.alone.row.samples)
"""
LOOP = """
for number, (batch,) in enumerate(session.shard(data, 8, epochs=2)):
    optimizer.zero_grad()
    {0}
    optimizer.step()
    {1}
"""


def loop(join: str = "join()", first: str = "backward(batch)", last: str = "") -> str:
    return f"optimizer = {join}\n" + LOOP.format(first, last)


# A part of the model that no optimizer steps, and that the script updates.
FOLLOWED = "model[3].follower = torch.nn.Parameter(torch.ones(2, 6).double(), requires_grad=False)\n"
TRAINED = "join(torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1))"
SCRIPTS = {
    "plain": loop(),
    "frozen follower": FOLLOWED + loop(TRAINED, last="model[3].follower.data.lerp_(model[3].weight.data, 0.1)"),
    "frozen teacher": FOLLOWED
    + loop(TRAINED, last="with torch.no_grad(): model[3].follower.lerp_(model[3].weight, 0.1)"),
    "clipped": loop(first="seen.append(backward(batch)); optimizer.clip_grad_norm(0.05)"),
    "summed": loop("join(reduction='sum')"),
    "recorded": loop(first="session.record(loss=backward(batch), num_samples=3 + number)"),
    "skipped": loop(first="backward(batch)\n    if number % 3 == 2:\n        session.skip()\n        continue"),
    "nan": loop(first="backward(batch, float('nan') if number == 3 else 1.0)", last="seen.append(session.step)"),
    "only nan": loop(first="backward(batch, float('nan'))", last="keep()"),
    "overflow": loop(first="optimizer.param_groups[0]['lr'] = 1e9; backward(batch, 1e150)", last="keep()"),
    "later overflow": loop(
        "join(torch.optim.SGD(model.parameters(), lr=1e9))",
        "backward(batch, 1e150 if number == 1 else 1e-15)",
        "keep()",
    ),
    "nan rows": "table = session.rows('items', 4, 8, lr=0.1)\n"
    + loop(first="backward(batch + table(torch.arange(8) % 4) * (float('nan') if number == 3 else 1))"),
    "nan buffer": loop(last="if number == 3: model[1].running_mean.fill_(float('nan'))"),
    "skipping": loop(first="backward(batch, float('nan') if number == 3 else 1.0)", last="seen.append(session.step)"),
    "mended": loop(
        first="backward(batch)\n    if number == 3:\n        model[0].weight.grad[0, 0] = float('nan')\n"
        "        model[1].running_var[2] = float('inf')"
    ),
    "halting": loop(first="backward(batch, float('nan') if number == 3 else 1.0)", last="keep()"),
    "large": loop(first="seen.append(backward(batch, 1e4 if number == 3 else 1.0))"),
    "scaled down": loop(),
    "rate": loop(last="keep()\n    if number == 3: optimizer.param_groups[0]['lr'] = 1e12"),
    "first rate": loop("join(torch.optim.SGD(model.parameters(), lr=1e12))"),
    "another switch": loop(last="keep(); optimizer.param_groups[0]['nesterov'] = True"),
    "rows' rate": "table = session.rows('items', 4, 8, lr=0.1)\n"
    + loop(first="backward(batch + table(torch.arange(8) % 4)); table.lr = -1.0"),
    "rows overflow": "table = session.rows('items', 4, 8, optimizer='sgd', lr=1e9, dtype=torch.float64)\n"
    + loop(first="backward(batch); (table(torch.arange(8) % 4).sum() * 1e300).backward()"),
    "begun": "model[0].weight.data[0, 0] = float('inf')\n" + loop(),
    "touched": loop(last="keep()\n    if number == 3: model[0].weight.data.clamp_(-0.1, 0.1)"),
    "buffer": loop(last="if number == 3: model[1].running_mean.fill_(1.0)"),
    "stopped": loop(last="if number == 3: session.stop('enough')"),
    "raises": loop(last="keep()\n    if number == 3: raise ValueError('of the script')"),
    "exits": loop(last="keep()\n    if number == 3: sys.exit(3)"),
    "frozen": loop(last="model[0].requires_grad_(number < 3)"),
    "unfrozen": "model[0].requires_grad_(False)\n" + loop(last="model[0].requires_grad_(number > 2)"),
    "own gradients": loop(
        first="backward(batch)\n    for item in model.parameters(): item.grad = item.grad.t().contiguous().t()"
    ),
    "gaps": "model[0].weight = torch.nn.Parameter(torch.randn(6, 16).double()[:, ::2])\n" + loop(),
    "no count": loop(first="session.record(loss=backward(batch), num_samples=-1)", last="keep()"),
    "inner": loop(first="backward(batch); keep(); optimizer.inner.step()"),
    "state": loop("join(torch.optim.Adam(model.parameters()))", last="keep(); optimizer.state = {}"),
    "hooked": """
inner = torch.optim.SGD(model.parameters(), lr=0.1)
inner.register_step_post_hook(print)
join(inner)
""",
    "LBFGS": loop("join(torch.optim.LBFGS(model.parameters()))"),
    "scheduled": """
optimizer = join(torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
session.state(schedule=schedule)
for (batch,) in session.shard(data, 8, epochs=2):
    optimizer.zero_grad()
    backward(batch)
    optimizer.step()
    schedule.step()
    seen.append([sorted(state) for state in optimizer.state_dict()["state"].values()])
for state in optimizer.state.values():
    seen += [state["exp_avg"].sum().item(), state["max_exp_avg_sq"].sum().item()]
""",
    "accumulated": """
optimizer, batches = join(), session.shard(data, 4, accumulate=3, epochs=2)
for number, (batch,) in enumerate(batches):
    backward(batch)
    if number % 3 == 2 or not batches.remaining:
        optimizer.step()
        optimizer.zero_grad()
""",
    "ahead": """
optimizer, ahead = join(), []
batches = iter(session.shard(data, 8, prefetch=2, epochs=2))
while ahead := [*ahead, *(batch for (batch,) in islice(batches, 3 - len(ahead)))]:
    optimizer.zero_grad()
    backward(ahead.pop(0))
    optimizer.step()
""",
    "epochs": """
optimizer = join()
batches = session.shard(data, 16)
for epoch in session.epochs(3):
    for (batch,) in batches:
        optimizer.zero_grad()
        session.record(loss=backward(batch), accuracy=float(epoch))
        optimizer.step()
    seen.append((epoch, session.epoch, session.step))
""",
    "own loader": """
optimizer = join()
for (batch,) in DataLoader(data, 8):
    optimizer.zero_grad()
    backward(batch)
    optimizer.step()
""",
    "closure": """
optimizer = join()
for (batch,) in session.shard(data, 8):
    def closure():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss
    seen.append(optimizer.step(closure).item())
""",
    "two": """
parts = (model[0], torch.optim.Adam(model[0].parameters())), (model[3], torch.optim.SGD(model[3].parameters(), lr=0.1))
first, second = session.optimizers(first=parts[0], second=parts[1])
for number, (batch,) in enumerate(session.shard(data, 8, epochs=2)):
    for optimizer in (second, first, second) if number % 2 else (first, second):
        optimizer.zero_grad()
        model[3](model[0](batch)).square().mean().backward()
        optimizer.step()
""",
    "first part nan": """
parts = (model[0], torch.optim.Adam(model[0].parameters())), (model[3], torch.optim.SGD(model[3].parameters(), lr=0.1))
optimizers = session.optimizers(first=parts[0], second=parts[1])
for number, (batch,) in enumerate(session.shard(data, 8, epochs=2)):
    for optimizer, of_first in zip(optimizers, (True, False)):
        weights = [item.sum().item() for item in optimizer.param_groups[0]["params"]]
        optimizer.zero_grad()
        (model[3](model[0](batch)).square().mean() * (float("nan") if number in (0, 4) and of_first else 1)).backward()
        optimizer.step()
        assert (weights == [item.sum().item() for item in optimizer.param_groups[0]["params"]]) == (number in (0, 4))
""",
    "rows": """
table = session.rows("items", 20, 8, optimizer="sparse_adam", lr=0.1, dtype=torch.float64)
optimizer = join()
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
for number, (batch,) in enumerate(session.shard(data, 8, epochs=2)):
    optimizer.zero_grad()
    seen.append(backward(batch + table(torch.arange(8) % (number + 1))))
    optimizer.clip_grad_norm(0.1)
    optimizer.step()
    schedule.step()
seen.append(table(torch.arange(20)).sum().item())
""",
    "scaled": """
optimizer, scaler = join(), session.scaler("cpu", init_scale=8.0)
for number, (batch,) in enumerate(session.shard(data, 8, epochs=2)):
    optimizer.zero_grad()
    scaler.scale((model(batch) * (float("inf") if number == 4 else 1.0)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "own scaler": """
optimizer, scaler = join(), torch.amp.GradScaler("cpu", init_scale=8.0)
for (batch,) in session.shard(data, 8, epochs=2):
    scaler.scale(model(batch).square().mean()).backward()
    scaler.step(optimizer)
""",
    "after the end": loop() + "session.finish()\nkeep()\noptimizer.step()",
    "a second": loop() + "join()",
    "without a batch": loop() + "backward(x)\noptimizer.step()",
}


# Settings of the run.
SETTINGS = {
    "skipping": {"PS_STORE__ON_NONFINITE": "skip"},
    "mended": {"PS_STORE__ON_NONFINITE": "clip"},
    "halting": {"PS_STORE__ON_NONFINITE": "halt"},
    "large": {"PS_STORE__MAX_NORM": "10"},
    "scaled down": {"PS_STORE__MAX_NORM": "0.05", "PS_STORE__ON_LARGE": "clip"},
}
# The exit codes of those that do not end well.
CODES = {"frozen teacher": 2, 
    "only nan": 16, "overflow": 16, "later overflow": 16, "halting": 16, "rows overflow": 16, "rate": 1,
    "first rate": 1, "another switch": 1, "rows' rate": 1, "begun": 2, "touched": 2, "raises": 1, "exits": 3,
    "inner": 2, "no count": 2, "state": 2, "hooked": 2, "LBFGS": 2, "own scaler": 2, "after the end": 2,
    "a second": 2, "without a batch": 2,
}  # fmt: skip


def found_by(script: Process) -> dict[str, Any]:
    """What a script did: its exit code, the sentences that it was told, and what it kept."""
    found: dict[str, Any] = {"code": script.wait()}
    found["refused"] = [line for line in script.output.splitlines() if line.startswith(("paramserver: ", "  fix: "))]
    found["told"] = [
        {key: value for key, value in event.items() if key != "timestamp"}
        for event in script.events()
        if event["level"] != "debug"
    ]
    path = script.path.with_suffix(".pt")
    return found | (torch.load(path) if path.exists() else {})


def is_same(mine: Any, other: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return torch.allclose(mine, other, rtol=0, atol=1e-6)
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(is_same(mine[key], other[key]) for key in mine)
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(other) and all(map(is_same, mine, other))
    return mine == (pytest.approx(other, abs=1e-6) if isinstance(mine, float) else other)


# Variants of others.
SLOW = {
    "summed", "skipped", "only nan", "later overflow", "nan rows", "mended", "halting", "scaled down", "first rate",
    "another switch", "exits", "frozen", "rows overflow", "inner", "own loader", "closure", "own scaler", "a second",
    "without a batch", "own gradients",
}  # fmt: skip


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in SCRIPTS])
def test_a_script_alone_is_one_worker_in_sync(cluster: Cluster, kind: str) -> None:
    more = SETTINGS.get(kind, {})
    server = cluster.server("--mode", "sync", "--workers", "1", "--summary", "s.json", **more)
    scripts = []
    for name, environ in {"alone": {}, "sync": {"PS_SERVER": cluster.address, "RANK": "0"}}.items():
        path = cluster.folder / f"{name}.py"
        text = f'OUT = "{name}.pt"' + BEFORE + SCRIPTS[kind] + AFTER
        path.write_text(text, encoding="utf-8")
        scripts.append(cluster.fork(name, path.name, **environ, **more))
    alone, sync = map(found_by, scripts)
    assert alone["code"] == CODES.get(kind, 0), scripts[0].output
    assert bool(alone["refused"]) == (alone["code"] > 0 and kind not in ("raises", "exits")), scripts[0].output
    differing = [key for key in alone.keys() | sync.keys() if not is_same(alone.get(key), sync.get(key))]
    assert not differing, [(alone.get(key), sync.get(key)) for key in differing]
    if not alone["code"]:
        assert server.wait() == 0, server.output
        samples = cluster.summary()["workers"][0]["samples"]
        assert f"samples {samples}\n" in scripts[0].output


def test_a_script_alone_names_the_settings_that_only_a_server_reads(cluster: Cluster) -> None:
    (cluster.folder / "alone.py").write_text("import paramserver\nparamserver.connect()\n", encoding="utf-8")
    settings = {
        "PS_STORE__POLYAK": "0.9",
        "PS_CHECKPOINT__DIR": "kept",
        "PS_STORE__CLIP_NORM": "1",
        "PS_RUN__STEPS": "3",
    }
    script = cluster.fork("alone", "alone.py", **settings)
    assert script.wait() == 0
    assert [event["keys"] for event in script.events("unread_settings")] == ["checkpoint.dir, store.polyak"]
