"""Hugging Face's Trainer; one line is ours."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from problem import Case, Data, Model, optimizer_of, play
from transformers import Trainer, TrainingArguments

from paramserver.integrations.huggingface import ParameterServerCallback


def train(case: Case, model: Model, data: Data, checkpoint: Path, mode: str) -> int:
    arguments = TrainingArguments(
        str(checkpoint),
        per_device_train_batch_size=case.batch,
        gradient_accumulation_steps=case.accumulate,
        max_steps=case.own_steps,
        max_grad_norm=case.clip if mode != "sync" else 0,
        bf16=case.bf16,
        train_sampling_strategy="random" if case.shuffle else "sequential",
        save_strategy="steps" if case.saves else "no",
        save_steps=case.own_steps,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=optimizer_of(model))
    trainer.add_callback(ParameterServerCallback(trainer))
    trainer.train(resume_from_checkpoint=str(checkpoint / f"checkpoint-{case.cold_at or 4}") if case.loads else None)
    assert trainer.is_world_process_zero() == (os.environ["PS_WORKER__RANK"] == "0")
    return trainer.state.global_step


def main() -> None:
    play(train)
