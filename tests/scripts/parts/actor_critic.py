"""Actor and critic of one module with a common trunk, which the critic trains; both backward passes come before both
steps. There is no data set: states come from a generator of the rank's own."""

import os

import torch
from torch import nn
from torch.nn import functional as F

import paramserver

STEPS, BATCH = 12, int(os.environ["BATCH"])


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(5, 8)
        self.actor, self.critic = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, states):
        hidden = torch.tanh(self.trunk(states))
        return torch.distributions.Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)


torch.manual_seed(0)
model = ActorCritic().double()
draws = torch.Generator().manual_seed(7)
with paramserver.connect() as session:
    critic_parameters = [*model.trunk.parameters(), *model.critic.parameters()]
    actor_optimizer, critic_optimizer = session.optimizers(
        actor=(model, torch.optim.RMSprop(model.actor.parameters(), lr=0.01)),
        critic=(model, torch.optim.RMSprop(critic_parameters, lr=0.02, momentum=0.5)),
    )
    for _ in range(STEPS):
        states = torch.randn(20, 5, dtype=torch.float64, generator=draws)[session.rank :: session.num_workers]
        actions = states.argmax(1) % 3
        policy, values = model(states)
        rewards = states.sum(1)
        actor_loss = -(policy.log_prob(actions) * (rewards - values).detach()).mean()
        critic_loss = F.mse_loss(values, rewards)
        actor_optimizer.zero_grad()
        critic_optimizer.zero_grad()
        actor_loss.backward(retain_graph=True)
        model.trunk.zero_grad()  # the trunk is the critic's
        critic_loss.backward()
        nn.utils.clip_grad_norm_(model.actor.parameters(), 1e6)
        session.record(loss=critic_loss.item(), num_samples=len(states))
        actor_optimizer.step()
        critic_optimizer.step()
    if session.finish():
        torch.save(model.state_dict(), os.environ["OUT"])
