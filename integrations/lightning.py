"""Lightning: a strategy, so that the module and its optimizer need no change.

trainer = L.Trainer(strategy=ParameterServerStrategy(), ...)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..common.errors import UsageError
from ..worker.api import connect
from ..worker.training.session import Session
from . import data, lacks

try:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
except ImportError as error:
    raise lacks("lightning", error) from None


class ParameterServerStrategy(ParallelStrategy):
    """Joins the run (`connect()`) in `fit`, with the module's weights or the checkpoint's. Rank 0 saves and logs."""

    strategy_name = "paramserver"

    def __init__(self, address: str | None = None, rank: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._connection_options = address, rank
        self._loader: Any = None  # of the training data
        self._begins: tuple[int, int, int] | None = None  # steps: of the trainer, its new step, of the run
        self._saved: dict[str, Any] | None = None  # state of the run in the checkpoint
        self.session: Session | None = None

    # ---- rank and device --------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank % len(devices)]

    @property
    def global_rank(self) -> int:
        return self.session.rank if self.session is not None else 0

    @property
    def world_size(self) -> int:
        return data.num_ranks(self.session) if self.session is not None else 1

    def setup_environment(self) -> None:
        if self.session is None and self._trainer.state.fn == TrainerFn.FITTING:
            self.session = connect(*self._connection_options)
            vars(rank_zero_only)["rank"] = self.global_rank
        super().setup_environment()

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # ---- training ---------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        made = super().optimizers
        if len(made) != 1:
            message = f"configure_optimizers() returned {len(made)} optimizers: a run has one"
            raise UsageError(message, fix="put all parameters into groups of one optimizer")
        assert self.session is not None and self.lightning_module is not None
        self.optimizers = [self.session.optimizer(self.lightning_module, made[0])]
        if trainer.gradient_clip_val:
            data.say_clipping(self.session, f"gradient_clip_val={trainer.gradient_clip_val:g}")
        if trainer.max_steps > 0:
            self.session.expect(trainer.max_steps)
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            self.session.watched(scaler)
        self._saved = (trainer._checkpoint_connector._loaded_checkpoint or {}).get(data.PLACE)
        if not trainer.ckpt_path:  # the checkpoint would load them later
            remembered: dict[str, Any] = {
                f"scheduler{n}": config.scheduler for n, config in enumerate(self.lr_scheduler_configs)
            }
            if scaler is not None:
                remembered["scaler"] = scaler
            self.session.state(**remembered)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Divide training data. Validation data is not divided, because no process would combine the results."""
        if self._trainer.training and self.session is not None:
            share, self._loader = None, dataloader
            if self._trainer._accelerator_connector.use_distributed_sampler:
                share = data.divide(dataloader, self.session)
            self._begin(share)
        return dataloader

    def _begin(self, share: data.RankSampler | None) -> None:
        """Move the trainer to this rank's step of the run, which may differ from its checkpoint."""
        assert self.session is not None
        trainer, accumulate = self._trainer, self._trainer.accumulate_grad_batches
        if self._begins is None:  # only for the first loader
            own_step, trainer.should_stop = trainer.global_step, self.session.is_done
            step = data.step_of_trainer(self.session, own_step, self._saved)
            self._begins = own_step, step, self.session.step
            loop = trainer.fit_loop.epoch_loop
            loop._batches_that_stepped = loop.automatic_optimization.optim_progress.optimizer.step.total.completed = (
                step
            )
            if trainer.ckpt_path:
                for config in self.lr_scheduler_configs:
                    per = -(-len(self._loader) // accumulate) if config.interval == "epoch" else config.frequency
                    data.catch_up(config.scheduler, step // per)
        own_step, step, step_of_run = self._begins
        if share is not None and step != own_step:
            is_first = self.session.step == step_of_run
            share.go_to(step, own_step, self._loader, accumulate, is_first)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self.session is not None
        self.session.record(num_samples=data.num_samples_in(batch, self._loader))

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **options: Any) -> Any:
        found = super().optimizer_step(optimizer, closure, model, **options)
        assert self.session is not None
        data.check_place(self.session)
        self._trainer.should_stop |= self.session.is_over()
        return found

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.session is not None:
            checkpoint[data.PLACE] = data.place_in(self.session)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def on_train_end(self) -> None:
        assert self.session is not None
        self.session.finish()
        if self._begins is not None:
            _, step, step_of_run = self._begins
            data.say_lost(self.session, self._trainer.global_step - step + step_of_run)

    # ---- collectives, which return this rank's own value ------------------------------------

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    def all_gather(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    def barrier(self, *_: Any, **__: Any) -> None:
        pass
