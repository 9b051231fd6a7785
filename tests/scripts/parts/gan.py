"""A GAN as the tutorials have it: the critic steps on a real and a fake batch, then the generator (each
EVERY batches), whose loss goes through the critic. NOISE: from torch's generator, and BatchNorm in the generator.
SGD for the critic."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserver
from paramserver.tests.gates import Gate

STEPS, BATCH, EVERY = 12, int(os.environ["BATCH"]), int(os.environ.get("EVERY", "1"))
WIDTH, GATE = 8, Gate(os.environ.get("GATE", ""), os.environ.get("GATE_AT", ""))
torch.manual_seed(0)
real_data = torch.randn(240, 4, dtype=torch.float64) * 0.5 + torch.tensor([1.0, -1.0, 0.0, 2.0], dtype=torch.float64)
# Of each sample, so that two halves of a batch have those of the whole.
latents = torch.randn(240, 3, dtype=torch.float64)
norm = nn.BatchNorm1d(WIDTH) if os.environ.get("NOISE") else nn.Identity()
generator = nn.Sequential(nn.Linear(3, WIDTH), norm, nn.Tanh(), nn.Linear(WIDTH, 4)).double()
critic = nn.Sequential(nn.Linear(4, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1)).double()


if os.environ.get("SGD"):  # of another class, with two groups
    groups = [{"params": critic[:1].parameters()}, {"params": critic[1:].parameters(), "lr": 0.02}]
    of_critic = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
else:
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01, weight_decay=0.01)


def loss_of(scores, is_real):
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))


def main():
    with paramserver.connect() as session:
        g_optimizer, c_optimizer = session.optimizers(
            generator=(generator, torch.optim.Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.999))),
            critic=(critic, of_critic),
        )
        schedule = torch.optim.lr_scheduler.StepLR(g_optimizer, step_size=4, gamma=0.5)
        batches = session.shard(TensorDataset(real_data, latents), batch_size=BATCH, epochs=None)
        for number, (real, latent) in enumerate(batches):
            noise = torch.randn_like(latent) if os.environ.get("NOISE") else latent
            c_optimizer.zero_grad()
            c_loss = loss_of(critic(real), True)
            c_loss.backward()
            fake = generator(noise)
            loss_of(critic(fake.detach()), False).backward()
            session.record(loss=c_loss.item())
            c_optimizer.step()
            GATE.wait(f"critic {number}")
            if number % EVERY == 0:
                g_optimizer.zero_grad()
                loss_of(critic(fake), True).backward()
                g_optimizer.step()
                GATE.wait(f"generator {number}")
                if not os.environ.get("NOISE"):
                    schedule.step()
        if session.finish():
            parts = {"generator": generator.state_dict(), "critic": critic.state_dict()}
            torch.save(
                {f"{part}.{name}": item for part, state in parts.items() for name, item in state.items()},
                os.environ["OUT"],
            )


if __name__ == "__main__":
    main()
