"""Hugging Face's Trainer: joins when training begins, so weights are those of the checkpoint it goes on from.

trainer = Trainer(...)
trainer.add_callback(ParameterServerCallback(trainer))
"""

from __future__ import annotations

from typing import Any

from ..worker.api import connect
from . import lacks
from .data import divide, samples_of, say_clipping, steps_of

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    from .accelerate import take_place, take_step
except ImportError as error:
    raise lacks("huggingface", error) from None


class ParameterServerCallback(TrainerCallback):
    """Connects when it is made (`connect()`), leaves the run when training ends. Rank 0 saves and logs."""

    def __init__(self, trainer: Trainer, address: str | None = None, rank: int | None = None) -> None:
        self.session = connect(address, rank)
        take_place(self.session)
        self._is_through = False
        make = trainer.get_train_dataloader

        def get_train_dataloader() -> Any:
            loader = make()
            divide(loader, self.session)
            return loader

        vars(trainer)["get_train_dataloader"] = get_train_dataloader

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        take_step(self.session, model, optimizer, goes_on=state.global_step > 0)
        if args.max_grad_norm:
            say_clipping(self.session, f"max_grad_norm={args.max_grad_norm:g}")
        self.session.expect(state.max_steps)
        if (step := steps_of(self.session)) and (share := divide(train_dataloader, self.session)) is not None:
            accumulate, batch = args.gradient_accumulation_steps, samples_of(train_dataloader)
            share.go_to(step, state.global_step, len(train_dataloader), batch, accumulate)
        state.global_step = step or state.global_step  # of another worker's, which this one replaces

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.session.record(num_samples=args.train_batch_size * args.gradient_accumulation_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_training_stop |= self.session.is_done
        control.should_save &= self.session.rank == 0
        if control.should_training_stop:  # before the best checkpoint is loaded
            self._finish()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_save &= self.session.rank == 0
        if control.should_training_stop:
            self._finish()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self._is_through:
            self._is_through = True
            self.session.finish()
