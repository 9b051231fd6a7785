"""Hugging Face's Trainer: joins when training begins, after the Trainer has loaded its checkpoint.

trainer = Trainer(...)
trainer.add_callback(ParameterServerCallback(trainer))
"""

from __future__ import annotations

from typing import Any

from ..worker.api import connect
from . import data, lacks

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    from .accelerate import take_place, take_step
except ImportError as error:
    raise lacks("huggingface", error) from None


class ParameterServerCallback(TrainerCallback):
    """Connects in its constructor (`connect()`), and leaves the run when training ends. Rank 0 saves and logs."""

    def __init__(self, trainer: Trainer, address: str | None = None, rank: int | None = None) -> None:
        self.session = connect(address, rank)
        take_place(self.session)
        self._num_before = 0  # steps before the run's first
        self._loader: Any = None
        make, compute = trainer.get_train_dataloader, trainer.training_step

        def get_train_dataloader() -> Any:
            self._loader = make()
            data.divide(self._loader, self.session)
            return self._loader

        def training_step(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            self.session.record(num_samples=data.num_samples_in(inputs, self._loader))
            return compute(model, inputs, *args, **options)

        vars(trainer).update(get_train_dataloader=get_train_dataloader, training_step=training_step)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        session, own_step = self.session, state.global_step
        remembered: Any = state.stateful_callbacks  # restored from a checkpoint
        take_step(session, model, optimizer, goes_on=own_step > 0)
        session.expect(state.max_steps)
        if args.max_grad_norm:
            data.say_clipping(session, f"max_grad_norm={args.max_grad_norm:g}")
        if not own_step:  # otherwise the checkpoint restored scheduler and scaler
            session.state(scheduler=lr_scheduler, **({"scaler": optimizer.scaler} if optimizer.scaler else {}))
        step = data.step_of_trainer(session, own_step, remembered.get(data.PLACE))
        data.catch_up(lr_scheduler, step)
        self._num_before = step - session.step
        if step != own_step and (share := data.divide(train_dataloader, session)) is not None:
            share.go_to(step, own_step, train_dataloader, args.gradient_accumulation_steps)
        state.global_step = step  # of the worker that it replaces, or later than its checkpoint

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        data.check_place(self.session)
        remembered: Any = state.stateful_callbacks
        remembered[data.PLACE] = data.place_in(self.session)
        control.should_training_stop |= self.session.is_over()
        self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_save &= self.session.rank == 0
        if control.should_training_stop:  # before the best checkpoint is loaded
            self.session.finish()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.session.finish()
        data.say_lost(self.session, state.global_step - self._num_before)
