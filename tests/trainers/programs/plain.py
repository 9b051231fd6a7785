"""A loop of one's own."""

from pathlib import Path

import torch
from problem import Case, Data, Model, optimizer_of, play

import paramserver


def train(case: Case, model: Model, data: Data, checkpoint: Path, mode: str) -> int:
    session = paramserver.connect()
    raw, scheduler = optimizer_of(model)
    if case.loads:
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        scheduler.load_state_dict(saved["scheduler"])
    optimizer = session.optimizer(model, raw)
    if case.loads:
        optimizer.load_state_dict(saved["optimizer"])
    scheduler.optimizer = optimizer
    session.state(scheduler=scheduler)
    stated = {"accumulate": case.accumulate, "epochs": -(-case.own_steps // 4)}
    batches = iter(session.shard(data, case.batch, shuffle=case.shuffle, **stated))
    while case.cold_at + session.step < case.own_steps:
        for _ in range(case.accumulate):
            batch = next(batches, None)
            if batch is None:
                break
            with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
                loss = model(**batch)["loss"]
            (loss / case.accumulate).backward()
        if batch is None:
            break
        if case.clip and mode != "sync":
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    num_steps = case.cold_at + session.step
    session.finish()
    if case.saves and session.rank == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        saved["steps"] = num_steps
        torch.save(saved, checkpoint)
    session.close()
    return num_steps


def main() -> None:
    play(train)
