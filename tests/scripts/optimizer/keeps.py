"""Keeps gradients after step() in every way, and compares them with copies: of a list, of hooks, of `grad` itself.

Large enough for the memory that worker and server share. Prints the names of the ways in which a number changed.
"""

import os
import sys

import torch

import paramserver

STEPS, IN_PLACE = 18, (range(6), range(10, 15))  # steps of a loop that accumulates into the same gradients


def main(session: paramserver.Session) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(400, 300), torch.nn.Linear(300, 2))
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    parameters = list(model.parameters())
    changed, kept, hooked = set(), [], []
    for step in range(STEPS):
        in_place = any(step in steps for steps in IN_PLACE)
        optimizer.zero_grad(set_to_none=not in_place)
        hooks = (
            []
            if in_place
            else [
                parameters[0].register_hook(hooked.append),
                parameters[2].register_post_accumulate_grad_hook(lambda parameter: hooked.append(parameter.grad)),
            ]
        )
        generator = torch.Generator().manual_seed(100 * rank + step)
        model(torch.randn(8, 400, generator=generator)).square().mean().backward()
        for hook in hooks:
            hook.remove()
        same, copies = (
            [parameter.grad for parameter in parameters],
            [parameter.grad.clone() for parameter in parameters],
        )
        clip = "clip" in sys.argv and step % 3 == 0
        if clip:
            optimizer.clip_grad_norm(0.05)
        optimizer.step()
        is_clipped = clip and session.settings.kind.worker_steps and not session.settings.kind.has_peers
        for parameter, gradient, copy in zip(parameters, same, copies, strict=True):
            if parameter.grad is not gradient:
                changed.add(f"another gradient after step {step}")
            if not (is_clipped or torch.equal(parameter.grad, copy)):
                changed.add(f"grad after step {step}")
        if not any(step + 1 in steps for steps in IN_PLACE):  # the loop itself changes those in place
            kept += [(step, gradient, gradient.clone()) for gradient in same]
            kept += [(step, gradient.view(-1)[1:], gradient.view(-1)[1:].clone()) for gradient in same[:1]]
            kept += [(step, gradient, gradient.clone()) for gradient in hooked]
            hooked.clear()
    changed |= {f"kept of step {step}" for step, now, then in kept if not torch.equal(now, then)}
    session.finish()
    print(sorted(changed), flush=True)
    session.close()
    assert not changed and kept


if __name__ == "__main__":
    main(paramserver.connect())
