"""A loop with Accelerate; one line is ours."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from problem import Case, Data, Model, optimizer_of, play
from torch.utils.data import DataLoader

from paramserver.integrations.accelerate import join


def train(case: Case, model: Model, data: Data, checkpoint: Path, mode: str) -> int:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16" if case.bf16 else "no", gradient_accumulation_steps=case.accumulate
    )
    optimizer, scheduler = optimizer_of(model)
    loader = DataLoader(data, case.batch, shuffle=case.shuffle)
    module, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    num_steps = 0
    if case.loads:
        saved = torch.load(checkpoint)
        num_steps = saved["steps"]
        model.load_state_dict(saved["model"])
        scheduler.load_state_dict(saved["scheduler"])
    session = join(accelerator, module, optimizer, loader)
    if case.loads:
        optimizer.load_state_dict(saved["optimizer"])
    else:
        for _ in range(session.step):  # of the worker that it replaces
            scheduler.scheduler.step()
    for _ in range(case.own_steps * case.accumulate // len(loader) + 1):
        for batch in loader:
            with accelerator.accumulate(module):
                accelerator.backward(module(**batch)["loss"])
                if case.clip and mode != "sync" and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(module.parameters(), case.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            num_steps += accelerator.sync_gradients
            if num_steps >= case.own_steps:
                break
        if num_steps >= case.own_steps:
            break
    session.finish()
    if case.saves and accelerator.is_main_process:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        saved["steps"] = num_steps
        accelerator.save(saved, checkpoint)
    session.close()
    return num_steps


def main() -> None:
    play(train)
