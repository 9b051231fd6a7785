"""Checks that a run can start on this machine, before any of its processes starts."""

from __future__ import annotations

from collections.abc import Sequence

from ...common.config.preflight.code import check_script, check_task
from ...common.config.preflight.machine import check_device, check_listening, check_optimizer, check_weights
from ...common.config.schema import Config
from ..plan.runs import Plan


def check_here(plans: Sequence[Plan], config: Config) -> None:
    """Raise ParamServerError where task or script, device, initial weights or addresses cannot be used here."""
    if config.launch.script is not None:
        check_script(config.launch.script)
    else:
        check_task(config.task.name, config.task.args)
        check_optimizer(config.optimizer.name)
        if config.task.init is not None:
            check_weights(config.task.init)
    check_device(config.worker.device)
    listen = next((plan.listen for plan in plans if plan.server is not None), None)
    if listen is None:  # one worker alone
        return
    server, host = config.server, listen.rpartition(":")[0]
    key = "flag --port" if config.launch.port is not None else "server.listen"
    wanted = [(key, listen), ("server.web", server.web), ("server.metrics", server.metrics)]
    if server.direct and server.direct_port:
        wanted.append(("server.direct_port", f"{host}:{server.direct_port}"))
    wanted += [("launch.serve", address) for address in {plan.serves_at for plan in plans} if address]
    for key, address in wanted:
        if address is not None:
            check_listening(address, key)
