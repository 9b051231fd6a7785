"""A LightningModule; of its Trainer one argument is ours."""

import os
from pathlib import Path

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint
from problem import Case, Data, Model, optimizer_of, play
from torch.utils.data import DataLoader

from paramserver.integrations.lightning import ParameterServerStrategy


class Module(L.LightningModule):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        optimizer, scheduler = optimizer_of(self.model)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(case: Case, model: Model, data: Data, checkpoint: Path, mode: str) -> int:
    saving = ModelCheckpoint(checkpoint, "saved", every_n_train_steps=case.own_steps, save_on_train_epoch_end=False)
    trainer = L.Trainer(
        strategy=ParameterServerStrategy(),
        max_steps=case.own_steps,
        accumulate_grad_batches=case.accumulate,
        reload_dataloaders_every_n_epochs=case.accumulate - 1,
        gradient_clip_val=case.clip if mode != "sync" else None,
        precision="bf16-mixed" if case.bf16 else None,
        callbacks=[saving] if case.saves else [],
        enable_checkpointing=case.saves,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        logger=False,
    )
    loader = DataLoader(data, case.batch, shuffle=case.shuffle)
    trainer.fit(Module(model), loader, ckpt_path=checkpoint / "saved.ckpt" if case.loads else None)
    assert trainer.world_size == 2
    assert trainer.is_global_zero == (os.environ["PS_WORKER__RANK"] == "0")
    return trainer.global_step


def main() -> None:
    play(train)
