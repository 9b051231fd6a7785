"""Optimizers as data: a torch.optim class by name, its groups and hyperparameters; and clipping of gradients.

The server steps flat runs of many parameters at once. That is correct for every optimizer that is elementwise. A trial
checks whether a class is elementwise. There is no list of classes, so new classes of torch work too.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from numbers import Real
from typing import Any, Literal

import torch

from ..errors import Reason, UsageError, did_you_mean, refusal
from .layout import DTYPES
from .onebit import OneBitAdam

Hyperparameters = dict[str, Any]
# How the server combines the gradients of a version: the mean weighted by samples, for a loss that is a mean over its
# batch, or the sum, for a loss that is a sum.
Reduction = Literal["mean", "sum"]

# Keys of a group that do not change the result of a step, and keys that belong to schedulers.
NOT_HYPERPARAMETERS = {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}
_NOT_SENT = NOT_HYPERPARAMETERS | {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
# The fix where a server cannot run an optimizer as it is.
IN_WORKERS = (
    "--mode localsgd, diloco or allreduce, whose workers run the optimizer (alone: ps-launch -n 1 --mode localsgd)"
)
# Limit on every hyperparameter: with larger values, products in float32 would not stay finite.
MAX_NUMBER = 1e9


@dataclass(frozen=True)
class GroupSpec:
    """Parameters, by name, that share hyperparameters."""

    tensors: tuple[str, ...]
    hyperparameters: Hyperparameters


@dataclass(frozen=True)
class TableSpec:
    """Rows [first, end) of a table of `num_rows` rows of `dim` numbers, see `tables.py`."""

    name: str
    num_rows: int
    dim: int
    dtype: str
    init_std: float
    optimizer: str  # a class in torch.optim that takes sparse gradients, or RowwiseAdagrad
    hyperparameters: Hyperparameters
    first: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows of this shard, without optimizer state."""
        return (self.end - self.first) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        itemsize: int = DTYPES[self.dtype].itemsize
        return self.dim * itemsize

    def part(self, shard: int, num_shards: int) -> TableSpec:
        """Return the spec with the rows of one shard."""
        first, end = (self.num_rows * number // num_shards for number in (shard, shard + 1))
        return replace(self, first=first, end=end)


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer of the whole model.

    `name` is the class in torch.optim, e.g. AdamW. If groups have several classes, it lists the class of each group, as
    in Adam+SGD. `tables` have their own optimizers. `reduction` combines the gradients of a version.
    """

    name: str
    groups: tuple[GroupSpec, ...]
    tables: tuple[TableSpec, ...] = ()
    reduction: Reduction = "mean"

    @property
    def classes(self) -> tuple[str, ...]:
        """The class of each group."""
        names = self.name.split("+")
        return tuple(names) if len(names) == len(self.groups) else (self.name,) * len(self.groups)

    @property
    def each(self) -> tuple[tuple[str, Hyperparameters], ...]:
        """The class and the hyperparameters of each group."""
        return tuple(zip(self.classes, (group.hyperparameters for group in self.groups), strict=True))

    def check_known(self) -> None:
        """Refuse unknown classes, classes that are not elementwise, and hyperparameters that they do not accept."""
        for name, hyperparameters in self.each:
            check_hyperparameters(name, hyperparameters)

    def check_changes(self, groups: Sequence[Hyperparameters]) -> None:
        """Refuse new hyperparameters, first of groups, then of tables, that the classes do not accept."""
        for (name, known), group in zip(self.each, groups, strict=False):
            if group:
                check_hyperparameters(name, group, known)
        for table, group in zip(self.tables, groups[len(self.groups) :], strict=False):
            lr = group.get("lr")
            if group and not (group.keys() == {"lr"} and isinstance(lr, float) and 0 <= lr <= MAX_NUMBER):
                raise refusal(Reason.BAD_REQUEST, f"table '{table.name}': {str(group)[:80]} is not a learning rate")

    def _structure(self) -> dict[str, Any]:
        """Return the properties that a run never changes, by the name that error messages use."""
        facts: dict[str, Any] = {"optimizer": self.name, "reduction": self.reduction}
        facts["number of groups"] = len(self.groups)
        facts |= {f"tensors of group {index}": group.tensors for index, group in enumerate(self.groups)}
        facts["number of tables"] = len(self.tables)
        for table in self.tables:  # all of a table except its hyperparameters
            sizes = {key: value for key, value in vars(table).items() if key != "hyperparameters"}
            facts |= {f"{key} of table '{table.name}'": value for key, value in sizes.items()}
        return facts

    def _numbers(self) -> dict[tuple[str, str], Any]:
        """Return every hyperparameter by (name of its group or table, its own name)."""
        groups = [(f"group {index}", group.hyperparameters) for index, group in enumerate(self.groups)]
        groups += [(f"table '{table.name}'", table.hyperparameters) for table in self.tables]
        return {(name, key): value for name, values in groups for key, value in sorted(values.items())}

    def _differing_numbers(self, other: OptimizerSpec) -> list[tuple[str, str, Any, Any]]:
        """Return (group or table, hyperparameter, own value, value in `other`), with None for a missing value."""
        mine, theirs = self._numbers(), other._numbers()
        pairs = [(*name, mine.get(name), theirs.get(name)) for name in sorted(mine.keys() | theirs.keys())]
        return [pair for pair in pairs if pair[2] != pair[3]]

    def differences(self, other: OptimizerSpec) -> list[str]:
        """Return the differences of `other`, as sentences. The list is empty if the optimizers are equal."""
        theirs = other._structure()
        for name, expected in self._structure().items():
            if theirs.get(name) != expected:
                values = "" if isinstance(expected, tuple) else f": expected {expected}, got {theirs.get(name)}"
                return [f"different {name}{values}"]
        return [f"{name}: expected {key}={mine}, got {got}" for name, key, mine, got in self._differing_numbers(other)]

    def new_numbers(self, other: OptimizerSpec) -> list[tuple[str, Any, Any]] | None:
        """Return (key, own value, value in `other`) of every number that differs, each distinct triple once.

        Returns None if anything other than a number differs.
        """
        if self._structure() != other._structure():
            return None
        found = [(key, then, now) for _, key, then, now in self._differing_numbers(other)]
        if any(_kind_of(then) != _kind_of(now) or isinstance(now, (bool, str)) for _, then, now in found):
            return None
        return [triple for at, triple in enumerate(found) if triple not in found[:at]]


class DelayedNesterov(torch.optim.Optimizer):
    """Nesterov's momentum for deltas that arrive one by one: every N-th step updates the momentum.

    Source: Liu et al. 2024, arXiv:2401.09135, algorithm 3. Late deltas already act as momentum, so a momentum that
    changes at each of them would be too large. With x, the share of a delta that one step uses (Delta / N in the
    paper):

        acc <- acc + x
        every N-th:  m <- mu m + acc;   theta <- theta - lr ((1 - c (N - 1)) mu m + x);   acc <- 0
        else:        theta <- theta - lr (c mu m + x)

    The caller counts to N and sets the group's numbers before each step: `share` is x / delta, `part` is the factor of
    mu m, and `moves` is 1 if the step updates m. With the defaults, the optimizer equals torch.optim.SGD with
    nesterov=True. Each line rounds once, so a tensor that is divided among shards gets the same bits.

    Raises ValueError for an invalid rate or momentum.
    """

    def __init__(self, params: Any, lr: float = 1.0, momentum: float = 0.5) -> None:
        if lr < 0 or not 0 <= momentum < 1:
            raise ValueError(f"lr is {lr:g}, momentum {momentum:g}; lr must be at least 0, momentum in [0, 1)")
        super().__init__(params, {"lr": lr, "momentum": momentum, "share": 1.0, "part": 1.0, "moves": 1.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # a server has no closure
        for group in self.param_groups:
            for parameter in (item for item in group["params"] if item.grad is not None):
                state = self.state[parameter]
                if not state:
                    state.update(momentum_buffer=torch.zeros_like(parameter), accumulated=torch.zeros_like(parameter))
                momentum, accumulated = state["momentum_buffer"], state["accumulated"]
                change = parameter.grad * group["share"]
                accumulated.add_(change)
                if group["moves"]:
                    momentum.mul_(group["momentum"]).add_(accumulated)
                    accumulated.zero_()
                if group["part"]:
                    change.add_(momentum * (group["part"] * group["momentum"]))
                parameter.sub_(change.mul_(group["lr"]))


_OURS: tuple[type[torch.optim.Optimizer], ...] = (OneBitAdam, DelayedNesterov)


def without_compiler() -> None:
    """Prevent optimizers from importing torch's compiler, for programs that compile nothing.

    Torch excludes some methods of optimizers from compilation. The first call of such a method imports the compiler,
    which takes 1.2 s of CPU in every process. This function sets the mark that the import would set
    (torch/_compile.py). In a version of torch that works differently, it changes nothing.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in filter(inspect.isfunction, vars(torch.optim.Optimizer).values()):
        plain = getattr(method, "__wrapped__", None)
        if plain is not None and method.__code__.co_filename.endswith("_compile.py"):
            setattr(plain, "__dynamo_disable", plain)


def plain_step(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return `step` without the hooks, profiler record and graph breaks that torch wraps around it.

    They take half the time of a small step, and import the compiler. Use this only for optimizers without hooks.
    """
    step: Callable[..., Any] = torch.no_grad()(inspect.unwrap(cls.step))
    return step


@contextmanager
def on_host() -> Iterator[None]:
    """Run a trial step with tensors on the CPU, whatever torch.set_default_device says in the user's script."""
    with torch.device("cpu"):
        yield


def known_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Return the optimizer classes of torch.optim and ours, by lower-case name."""
    return {
        name.lower(): cls
        for name, cls in (*vars(torch.optim).items(), *((cls.__name__, cls) for cls in _OURS))
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }


@cache  # mypy does not accept a class as hashable, hence the type: ignore comments at the calls
@on_host()
def is_elementwise(cls: type[torch.optim.Optimizer]) -> bool:
    """Whether two steps of a whole tensor and of its two halves give the same result."""
    start, gradient = torch.linspace(-1, 1, 24, device="cpu"), torch.linspace(2, -1, 24, device="cpu")
    whole, halves = start.clone().view(4, 6), list(start.clone().split(12))
    step = plain_step(cls)
    try:
        for tensors, grads in (([whole], [gradient.view(4, 6)]), (halves, gradient.split(12))):
            optimizer = cls(tensors, lr=0.1)  # type: ignore[call-arg]
            for scale in (1.0, -0.5):
                # The server also steps its windows one after another.
                for tensor, grad in zip(tensors, grads, strict=True):
                    tensor.grad = grad * scale
                    optimizer.param_groups[0]["params"] = [tensor]
                    step(optimizer)
    except Exception:
        return False  # it needs a closure, matrices, sparse gradients, ...
    return torch.equal(whole.flatten(), torch.cat(halves))


def find_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """Return the elementwise torch.optim class of this name, in any case.

    Raises UsageError with the nearest name for an unknown class, and a refusal for a class that is not elementwise.
    """
    known = known_optimizers()
    if (cls := known.get(name.lower())) is None:
        raise UsageError(f"unknown optimizer '{name}'", fix=did_you_mean(name.lower(), known))
    if not is_elementwise(cls):  # type: ignore[arg-type]
        usable = ", ".join(sorted(n for n, c in known.items() if is_elementwise(c)))  # type: ignore[arg-type]
        message = f"optimizer '{name}' does not work elementwise on tensors, so a server cannot run it on flat weights"
        fix = f"use one of {usable}; a script with --mode localsgd may use any optimizer"
        raise refusal(Reason.OPTIMIZER_UNSUPPORTED, message, fix=fix)
    return cls


def check_is_plain(optimizer: torch.optim.Optimizer, mode: str) -> None:
    """Raises UsageError for an optimizer that a server cannot run as it is: it would run the class alone.

    That is an unknown class, and an instance with hooks, replaced methods or moments.
    """
    cls = type(optimizer)
    known = known_optimizers().get(cls.__name__.lower())
    if known is not cls:
        words = f"a class of torch.optim: the server, which steps in mode {mode}, does not have it"
        if known:
            words = f"torch.optim.{cls.__name__}, which the server would step"
        message = f"optimizer {cls.__module__}.{cls.__name__} is not {words}"
        raise UsageError(message, fix=f"a class of torch.optim; or {IN_WORKERS}")
    if (found := _additions(optimizer)) is not None:
        message = f"the {cls.__name__} given to session.optimizer() has {found[0]}, but in mode {mode} the server steps"
        raise UsageError(f"{message}, and would not do this", fix=f"{found[1]}; or {IN_WORKERS}")


def _additions(optimizer: torch.optim.Optimizer) -> tuple[str, str] | None:
    """What an instance has beyond its class, and the fix; None: nothing."""
    cls = type(optimizer)
    replaced = [key for key in vars(optimizer) if callable(getattr(cls, key, None))]
    step = vars(optimizer).get("step")
    if hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is cls.step:
        replaced.remove("step")  # torch's schedulers wrap it to notice a call
    if inspect.unwrap(cls.step).__module__ not in {base.__module__ for base in cls.__mro__}:
        replaced.append("step")
    if replaced:
        return f"a replaced method {replaced[0]}()", "do its work in the loop, before step()"
    if hooks := [key for key, value in vars(optimizer).items() if key.endswith("_hooks") and value]:
        where = hooks[0].removeprefix("_optimizer_").removesuffix("_hooks").replace("_", " ")
        return f"a {where} hook", "register it on the optimizer that session.optimizer() returns"
    for state in optimizer.state.values():  # Adagrad has state before its first step
        if any(value is not None for value in state.values()) and float(state.get("step", 1)) > 0:
            fix = "give it an optimizer that has not stepped, and load its hyperparameters into the one that"
            return "moments of earlier steps", f"{fix} session.optimizer() returns"
    return None


def check_arguments(name: str, arguments: Mapping[str, Any]) -> type[torch.optim.Optimizer]:
    """Return the class if torch accepts `arguments` for it. Raises UsageError that names the argument."""
    cls = find_optimizer(name)
    accepted = [p for p in inspect.signature(cls).parameters if p not in ("self", "params", *NOT_HYPERPARAMETERS)]
    for key in arguments:
        if key not in accepted:
            raise UsageError(f"optimizer '{name}' has no argument '{key}'", fix=did_you_mean(key, accepted))
    try:
        cls([torch.zeros(1, device="cpu")], **as_arguments(arguments))
        defaults = cls([torch.zeros(1, device="cpu")]).defaults  # type: ignore[call-arg]
    except (TypeError, ValueError, IndexError) as error:
        raise UsageError(f"optimizer '{name}': {error}") from None
    for key, value in arguments.items():  # torch takes momentum=True for 1.0
        if bool in {type(value), type(defaults[key])} and type(value) is not type(defaults[key]):
            kind = "a switch, true or false" if isinstance(defaults[key], bool) else "a number"
            raise UsageError(f"optimizer '{name}': {key} is {kind}, got {value!r}", fix=f"e.g. {key}={defaults[key]}")
    return cls


def check_hyperparameters(name: str, hyperparameters: Hyperparameters, known: Hyperparameters | None = None) -> None:
    """Check `hyperparameters`, which replace those of `known`, with which the run began.

    Raises a BAD_REQUEST refusal for values that torch's class does not accept, for numbers above MAX_NUMBER, and for a
    change of anything other than a number. For example, the switch amsgrad decides which state the optimizer has.
    """
    cls = find_optimizer(name)
    defaults = cls([torch.zeros(1, device="cpu")]).defaults  # type: ignore[call-arg]
    accepted = {key: value for key, value in defaults.items() if key not in NOT_HYPERPARAMETERS}
    for key, value in hyperparameters.items():
        if key in NOT_HYPERPARAMETERS:
            raise refusal(Reason.BAD_REQUEST, f"'{key}' is not a hyperparameter")
        expected = (known or {}).get(key, accepted.get(key))
        is_changed = known is not None and not isinstance(value, (float, list)) and value != expected
        if is_changed or (key in accepted and expected is not None and _kind_of(expected) != _kind_of(value)):
            raise refusal(Reason.BAD_REQUEST, f"optimizer {name}: {key} is {value!r}, it was {expected!r}")
        items = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, (int, float)) and not abs(item) <= MAX_NUMBER for item in items):  # also refuses NaN
            message = f"optimizer {name}: {key} is {value!r}; at most {MAX_NUMBER:g} is possible"
            raise refusal(Reason.BAD_REQUEST, message)
    # Groups of AdamW also have decoupled_weight_decay, which its constructor does not accept.
    taken = accepted.keys() & inspect.signature(cls).parameters
    values = {key: value for key, value in {**(known or {}), **hyperparameters}.items() if key in taken}
    try:
        cls([torch.zeros(1, device="cpu")], **as_arguments(values))
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise refusal(Reason.BAD_REQUEST, f"optimizer {name}: {error}") from None


def _kind_of(value: Any) -> Any:
    """Return a value's type, where all numbers are one type and a list has the types of its items."""
    if isinstance(value, (list, tuple)):
        return [_kind_of(item) for item in value]
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value)


def build_optimizer(
    name: str, groups: list[dict[str, Any]], arguments: Mapping[str, Any] | None = None
) -> torch.optim.Optimizer:
    """Return a torch optimizer over `groups` (torch's parameter groups), fused if torch's fused step is correct."""
    cls = find_optimizer(name)
    # Some classes, such as Adagrad, read their arguments and not the groups while they build their state.
    accepted = inspect.signature(cls).parameters
    common = {k: v for k, v in groups[0].items() if k in accepted and k != "params"} if groups else {}
    arguments = as_arguments({**common, **(arguments or {})})
    groups = [{**group, **as_arguments({k: v for k, v in group.items() if k != "params"})} for group in groups]
    optimizer: torch.optim.Optimizer | None = None
    on_cpu = [param for group in groups for param in group["params"] if param.device.type == "cpu"]
    if has_fused(name) and all(
        _is_fused_right(name, item.dtype) and torch.empty_like(item, device="meta").stride() == item.stride()  # no gaps
        for item in on_cpu
    ):
        with suppress(RuntimeError, ValueError):  # this dtype or device has no fused step
            optimizer = cls(groups, **arguments, fused=True)  # type: ignore[call-arg]
    optimizer = optimizer or cls(groups, **arguments)
    for group in optimizer.param_groups:  # torch takes one value of Adagrad's first sums for all groups
        for param in group["params"] if "initial_accumulator_value" in group else ():
            optimizer.state[param]["sum"].fill_(group["initial_accumulator_value"])
    return optimizer


def has_fused(name: str) -> bool:
    """Whether torch has a fused step for this class."""
    return "fused" in inspect.signature(find_optimizer(name)).parameters


@cache
@on_host()
def _is_fused_right(name: str, dtype: torch.dtype) -> bool:
    """Whether torch's fused step on CPU equals a plain step in float32, except for rounding.

    In torch 2.13 the fused SGD with 16-bit floats does not: after four steps with lr 0.01, weights are wrong by 0.05,
    and with momentum by 0.13.
    """
    cls = find_optimizer(name)
    if dtype not in (torch.float16, torch.bfloat16) or "momentum" not in inspect.signature(cls).parameters:
        return True

    def stepped(dtype: torch.dtype, **how: Any) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 64, device="cpu").to(dtype), requires_grad=False)
        optimizer = cls([weight], lr=0.1, momentum=0.9, **how)  # type: ignore[call-arg]
        for scale in (1.0, -0.5, 2.0):
            weight.grad = (torch.linspace(2, -1, 64, device="cpu") * scale).to(dtype)
            plain_step(cls)(optimizer)
        return weight.data.float()

    try:
        return torch.allclose(stepped(dtype, fused=True), stepped(torch.float32, foreach=False), rtol=0.03, atol=0.03)
    except (RuntimeError, ValueError):
        return False  # this dtype has no fused step


class JointOptimizer:
    """Optimizers of one or several classes that act as one, with a common `state` and all groups in their order."""

    def __init__(self, classes: Sequence[str], groups: Sequence[dict[str, Any]]) -> None:
        """Build the optimizers of torch's parameter groups. `classes` has the class of each group."""
        self.state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        self._steps: list[Callable[[], Any]] = []
        self.onebit: list[OneBitAdam] = []  # `taken`, of each: the versions before its next step
        found: dict[int, dict[str, Any]] = {}
        for name in dict.fromkeys(classes):
            mine = [index for index, other in enumerate(classes) if other == name]
            item = build_optimizer(name, [groups[index] for index in mine])
            found.update(zip(mine, item.param_groups, strict=True))
            self.state.update(item.state)  # Adagrad has state before its first step
            item.state = self.state
            self._steps.append(partial(plain_step(type(item)), item))
            self.onebit += [item] if isinstance(item, OneBitAdam) else []
        self.param_groups = [found[index] for index in range(len(groups))]

    def step(self) -> None:
        for step in self._steps:
            step()


def describe_optimizers(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> OptimizerSpec:
    """Return one spec with the groups of all these torch optimizers. `names` maps id(parameter) to its name.

    Raises UsageError for tensors that are not trained parameters of the model, or that are in two groups.
    """
    groups: list[GroupSpec] = []
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if unknown := [tuple(p.shape) for p in group["params"] if id(p) not in names]:
            message = f"the optimizer holds {len(unknown)} tensors that are not parameters of the model, the first of "
            fix = "put them into the model before (model.name = parameter, or a ModuleList of all), or leave them out"
            raise UsageError(f"{message}shape {unknown[0]}", fix=fix)
        groups.append(GroupSpec(tuple(names[id(p)] for p in group["params"]), current_hyperparameters(group)))
    twice = [name for name, count in Counter(name for group in groups for name in group.tensors).items() if count > 1]
    if twice:
        message = f"parameter '{twice[0]}' is in two parameter groups, so it would be stepped twice"
        raise UsageError(message, fix="give every parameter to one group of one optimizer")
    classes = [type(optimizer).__name__ for optimizer in optimizers for _ in optimizer.param_groups]
    return OptimizerSpec("+".join(classes) if len(set(classes)) > 1 else classes[0], tuple(groups))


@on_host()
def state_keys(name: str, group: Mapping[str, Any]) -> set[str]:
    """Return the keys of the elementwise state that a tensor has after a step with the group's hyperparameters."""
    parameter = torch.nn.Parameter(torch.zeros(2, device="cpu"))
    parameter.grad = torch.ones(2, device="cpu")
    optimizer = build_optimizer(name, [{"params": [parameter], **current_hyperparameters(group)}])
    plain_step(type(optimizer))(optimizer)
    state = optimizer.state[parameter].items()
    return {key for key, value in state if isinstance(value, torch.Tensor) and value.shape == parameter.shape}


def current_hyperparameters(group: Mapping[str, Any]) -> Hyperparameters:
    """Return the hyperparameters of one torch parameter group as plain numbers, lists, booleans and text."""
    return {key: _plain(value) for key, value in group.items() if key not in _NOT_SENT and value is not None}


def apply_hyperparameters(group: dict[str, Any], values: Hyperparameters) -> None:
    """Set the hyperparameters of a torch parameter group. Keys that the group does not have are ignored."""
    for key, value in as_arguments(values).items():
        if key in group and key not in NOT_HYPERPARAMETERS:
            group[key] = value


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    return float(value)  # the only number type of protobuf's Struct


def as_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters as torch's classes take them, with tuples instead of lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


# ---- clipping ------------------------------------------------------------------------------------
# Clips gradients to a norm, as torch.nn.utils.clip_grad_norm_ does, but without `.grad` attributes.


_EPSILON = 1e-6  # torch's


def check_max_norm(max_norm: float) -> None:
    """Raise UsageError unless `max_norm` is positive. Infinity is allowed, and never clips."""
    if not isinstance(max_norm, Real | torch.Tensor) or not max_norm > 0:  # also refuses NaN
        raise UsageError(f"clip_grad_norm({max_norm!r}): the norm must be above 0", fix="such as clip_grad_norm(1.0)")


def clip(gradients: Sequence[torch.Tensor], max_norm: float) -> None:
    """Scale gradients in place so that their joint 2-norm is at most `max_norm`. They may be on several devices."""
    if not gradients:
        return
    norms = [torch.linalg.vector_norm(item.to_dense() if item.is_sparse else item) for item in gradients]
    scale(gradients, torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])), max_norm)


def scale(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place, which are of a gradient with this 2-norm, so that it is at most `max_norm`."""
    factor = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for item in gradients:
        item.mul_(factor.to(item.device))
