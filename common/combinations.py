"""Which capabilities go together: one table, without torch.

`Choices` describes a run: its settings, and what its script calls. A capability says in the words of its setting
whether a run has it. `REFUSALS` has each pair of capabilities that is refused, with the reason and a fix. Every other
pair is promised, and `make combinations` tries it. docs/combinations.md is made from this table.

The launcher and the server ask the table before anything starts. A worker asks it again when it knows the run's
settings, and at each call of its script that adds a capability.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from .errors import UsageError
from .kinds import ContributionKind
from .registry import MODES

WITHIN_WORKER = 3  # the stage of worker.zero that divides the model among the processes of a worker
# Codecs that send most values late, from their residual; those that send little more
# than signs; those that round.
_LATE = ("powersgd", "q2", "sparse", "topk")
_SIGNS = ("q2",)
_ROUNDED = ("bf16", "fp16")
# Classes of torch.optim that step along the gradient itself. All others divide it by its usual size.
_LINEAR = ("sgd", "asgd")
_ONEBIT = "onebitadam"

Optimizers = tuple[tuple[str, Mapping[str, Any]], ...]  # (class in torch.optim, arguments) of each parameter group


def _setting(key: str, default: Any) -> Any:
    """A field of `Choices` with the value of a setting."""
    return field(default=default, metadata={"setting": key})


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What is known of a run. A default means "not chosen", or that the asking process cannot know it."""

    mode: str
    kind: ContributionKind | None  # of contributions; None: the server has not said it yet
    has_rounds: bool = False  # a version is a round of all workers
    policy: Any = None  # the mode's class, in processes that have its file
    # settings
    aggregation: str = _setting("policy.aggregation", "mean")
    clip_norm: float | None = _setting("store.clip_norm", None)
    max_norm: float | None = _setting("store.max_norm", None)
    polyak: float | None = _setting("store.polyak", None)
    delayed_update: bool = _setting("policy.delayed_update", False)
    codec: str = _setting("worker.codec", "raw")
    reply_codec: str = _setting("worker.reply_codec", "raw")
    zero: int = _setting("worker.zero", 0)
    shards: int = _setting("server.shards", 1)
    colocate: bool = False
    regions: int = 0
    in_region: bool = False  # the server is that of a region of a run above
    upstream_every: int | None = _setting("upstream.every", None)
    mode_above: str = ""  # of the run above, once it is known
    kind_above: ContributionKind | None = None
    snapshots: str | None = _setting("checkpoint.dir", None)
    is_grouped: bool | None = None  # each worker is several processes (--group); None: not known
    pipeline: bool = _setting("worker.pipeline", False)
    evaluates: bool = _setting("worker.evaluate", False)
    precision: str = _setting("train.precision", "fp32")
    # options of the mode
    overlap_steps: int | None = None
    staleness: int | None = None
    late_cut: int | None = None
    fragments: int = 1
    # calls of the script
    optimizers: Optimizers = ()  # of the optimizer that the workers give
    num_optimizers: int = 1
    has_rows: bool = False
    sharded: str = ""  # a tensor that fully_shard divides among the processes of the worker
    # of the launcher
    is_alone: bool = False  # --mode single
    script: str | None = None
    serve: int | None = None  # a port
    web: bool = False


Words = Callable[[Choices], object]  # the words of a setting; anything false: the run does not have the capability


@dataclass(frozen=True)
class Refusal:
    """Two capabilities that exclude each other. {able} in `fix` stands for the modes that have `able`."""

    first: str
    second: str
    why: str
    fix: str
    able: str = ""  # an attribute of a mode's class

    def error(self, choices: Choices) -> UsageError | None:
        """Return the error if these choices have both capabilities."""
        first, second = CAPABILITIES[self.first](choices), CAPABILITIES[self.second](choices)
        if not (first and second):
            return None
        why, fix = self.why.format(c=choices), self.fix.format(able=self.able_modes, c=choices)
        return UsageError(f"{first}, and {second}: {why}", fix=fix)

    @property
    def able_modes(self) -> str:
        """The modes that `able` accepts, as text."""
        return ", ".join(name for name in MODES.names() if self.able and attrgetter(self.able)(MODES.load(name)))


def _kind(trait: Callable[[ContributionKind], bool], text: str) -> Words:
    """A capability of what workers send."""
    return lambda c: c.kind is not None and trait(c.kind) and f"mode {c.mode}, {text}"


def _lacks(trait: str, text: str) -> Words:
    """A capability of modes whose class, if the asking process has it, lacks an attribute."""
    return lambda c: c.policy is not None and not attrgetter(trait)(c.policy) and f"mode {c.mode}{text}"


def _optimizer(c: Choices, is_such: Callable[[str, Mapping[str, Any]], object]) -> str:
    """Return the first parameter group's class that is such, where the run steps along a mean gradient."""
    if c.kind is None or not c.kind.steps_along_mean_gradient:
        return ""
    return next((f"the optimizer is {name}" for name, arguments in c.optimizers if is_such(name, arguments)), "")


def _among_peers(c: Choices) -> bool:
    return c.kind is not None and c.kind.has_peers


def _gradients(c: Choices) -> bool:
    return c.kind is not None and c.kind.holds_gradients


def _steps_by_turns(c: Choices) -> bool:
    return c.mode in MODES.names() and bool(MODES.load(c.mode).may_step_by_turns)


def _above(c: Choices) -> str:
    return f"the run above is in mode {c.mode_above}"


CAPABILITIES: dict[str, Words] = {
    # modes
    "workers average among themselves": _kind(lambda k: k.has_peers, "whose workers average among themselves"),
    "workers send to the server": _kind(lambda k: not k.has_peers, "whose workers do not average among themselves"),
    "workers run the optimizer": _kind(lambda k: k.worker_steps, "whose workers run the optimizer"),
    "workers send weights": _kind(lambda k: not k.may_lose, "whose workers send weights"),
    "workers need the newest weights":
        _lacks("may_delay_update", ", whose workers compute on nothing but the newest weights"),
    "no step along the mean of all": _lacks("may_aggregate", ", which does not take one step along the mean of all"),
    "the server takes no steps": _lacks("kind.server_steps", ", whose workers send no gradients to the server"),
    "gradients without rounds": lambda c: _gradients(c) and not c.has_rounds and f"mode {c.mode}, which has no rounds",
    # settings of policy, store and server
    "policy.aggregation": lambda c: c.aggregation != "mean" and f"policy.aggregation is {c.aggregation}",
    "store.clip_norm": lambda c: c.clip_norm is not None and f"store.clip_norm is {c.clip_norm:g}",
    "store.max_norm": lambda c: c.max_norm is not None and f"store.max_norm is {c.max_norm:g}",
    "store.polyak": lambda c: c.polyak and f"store.polyak is {c.polyak:g}",
    "--delayed-update": lambda c: c.delayed_update and "--delayed-update (policy.delayed_update)",
    "--overlap-steps": lambda c: c.overlap_steps and f"policy.overlap_steps is {c.overlap_steps}",
    "no --delayed-update": lambda c: not c.delayed_update and f"workers of mode {c.mode} wait for every exchange",
    "staleness below that of a delayed update":
        lambda c: c.policy is not None and c.staleness is not None
        and c.staleness < c.policy.staleness_in_flight and f"--staleness {c.staleness}",
    "policy.late_cut 1": lambda c: c.late_cut == 1 and "policy.late_cut is 1",
    "outstanding means": lambda c: _among_peers(c) and c.staleness and f"policy.staleness is {c.staleness}",
    "--fragments": lambda c: c.fragments > 1 and f"policy.fragments is {c.fragments}",
    "--shards": lambda c: (c.shards > 1 and f"--shards {c.shards}") or (c.colocate and "--colocate"),
    "--regions": lambda c: (c.regions and f"{c.regions} regions") or (c.in_region and "a region (--upstream)"),
    "regions in the mode of the run above":
        lambda c: c.regions and not c.upstream_every and f"{c.regions} regions without --upstream-every",
    "--upstream-every":
        lambda c: (c.regions or c.in_region) and c.upstream_every and f"--upstream-every {c.upstream_every}",
    "a run above of peers": lambda c: c.kind_above is not None and c.kind_above.has_peers and _above(c),
    "a run above of gradients": lambda c: c.kind_above is not None and c.kind_above.holds_gradients and _above(c),
    "a region's server": lambda c: c.in_region and "--upstream",
    "--checkpoint-dir": lambda c: c.snapshots and f"--checkpoint-dir {c.snapshots}",
    # settings of the worker
    "--codec": lambda c: c.codec != "raw" and f"worker.codec is {c.codec}",
    "a codec that sends late": lambda c: c.codec in _LATE and f"worker.codec is {c.codec}",
    "a codec of signs": lambda c: c.codec in _SIGNS and f"worker.codec is {c.codec}",
    "a codec among peers":
        lambda c: _among_peers(c) and c.codec != "raw" and f"worker.codec is {c.codec} in mode {c.mode}",
    "codec onebit_adam": lambda c: c.codec == "onebit_adam" and "worker.codec is onebit_adam",
    "reply codec onebit_adam": lambda c: c.reply_codec == "onebit_adam" and "worker.reply_codec is onebit_adam",
    "--reply-codec": lambda c: c.reply_codec != "raw" and f"worker.reply_codec is {c.reply_codec}",
    "a reply codec that rounds": lambda c: c.reply_codec in _ROUNDED and f"worker.reply_codec is {c.reply_codec}",
    "--zero": lambda c: c.zero and f"worker.zero is {c.zero}",
    "--zero 1": lambda c: c.zero and c.zero != WITHIN_WORKER and f"worker.zero is {c.zero}",
    "--zero 3": lambda c: c.zero == WITHIN_WORKER and f"worker.zero is {c.zero}",
    "one process": lambda c: c.is_grouped is False and "each worker is one process (no --group)",
    "--group": lambda c: c.is_grouped and "each worker is a replica group (--group)",
    "--pipeline": lambda c: c.pipeline and "the model is cut into stages (worker.pipeline)",
    "an evaluator": lambda c: c.evaluates and "worker.evaluate",
    "precision fp16": lambda c: c.precision == "fp16" and "train.precision is fp16",
    # calls of the script
    "session.rows": lambda c: c.has_rows and "session.rows()",
    "several optimizers": lambda c: c.num_optimizers > 1 and f"session.optimizers() with {c.num_optimizers} of them",
    "fully_shard": lambda c: c.sharded and f"'{c.sharded}' is sharded over the processes of this worker (fully_shard)",
    "an adaptive optimizer": lambda c: _optimizer(c, lambda name, _: name.lower() not in _LINEAR),
    "an optimizer with momentum":
        lambda c: _optimizer(c, lambda name, given: name.lower() in _LINEAR and given.get("momentum")),
    "an optimizer other than OneBitAdam":
        lambda c: next((f"the optimizer is {name}" for name, _ in c.optimizers if name.lower() != _ONEBIT), ""),
    "a mode for one optimizer": lambda c: c.kind is not None and not _steps_by_turns(c) and f"mode {c.mode}",
    "no rounds of gradients":
        lambda c: c.kind is not None and not (_gradients(c) and c.has_rounds) and f"mode {c.mode}",
    # of the launcher
    "--mode single": lambda c: c.is_alone and "--mode single, one worker without a server",
    "a script": lambda c: c.script and f"the script {c.script}",
    "--serve": lambda c: c.serve is not None and f"--serve {c.serve}",
    "--web": lambda c: c.web and "--web",
}  # fmt: skip

REFUSALS: tuple[Refusal, ...] = (
    # ---- how the server steps
    Refusal("policy.aggregation", "no step along the mean of all", "no mean to replace",
            "take a mode that has one: {able}", "may_aggregate"),
    Refusal("store.clip_norm", "no step along the mean of all", "no mean whose norm could be clipped",
            "take a mode that has one: {able}; or clip in the worker's own loop", "may_aggregate"),
    Refusal("store.max_norm", "the server takes no steps", "the limit is for gradients",
            "clip gradients in the worker's own loop, or use a mode that sends them: {able}", "kind.server_steps"),
    Refusal("store.polyak", "workers average among themselves", "the server does not have the newest weights",
            "leave it out, or --mode sync, where all gradients pass the server"),
    Refusal("store.polyak", "session.rows", "the average does not cover rows",
            "leave store.polyak out, or use an nn.Embedding in the model"),
    Refusal("store.max_norm", "session.rows", "the limit does not cover rows",
            "leave store.max_norm out; in mode sync, store.clip_norm covers rows"),
    Refusal("policy.aggregation", "session.rows", "rows are aggregated by mean",
            "leave policy.aggregation out, or use an nn.Embedding in the model"),
    # ---- delayed updates
    Refusal("--delayed-update", "workers need the newest weights", "no step can be computed during an exchange",
            "leave it out, or take a mode that can: {able}", "may_delay_update"),
    Refusal("--delayed-update", "policy.late_cut 1", "every contribution is one version late, and would be dropped",
            "--set policy.late_cut=2 or more"),
    Refusal("--delayed-update", "staleness below that of a delayed update",
            "the step computed during an exchange is one ahead",
            "--staleness 1 or more"),
    Refusal("--delayed-update", "several optimizers", "each would step along gradients from before the other's step",
            "leave --delayed-update out"),
    Refusal("--overlap-steps", "no --delayed-update", "nothing overlaps an exchange",
            "--delayed-update, or leave it out"),
    # ---- workers that average among themselves
    Refusal("--reply-codec", "workers average among themselves", "they receive no weights",
            "leave it out, or --mode sync, where all gradients pass the server"),
    Refusal("several optimizers", "a mode for one optimizer", "they step by turns only in some modes",
            "use --mode sync, async or localsgd"),
    Refusal("--codec", "outstanding means", "peers encode whole gradients, one step after another",
            "leave one of them out: --staleness 0, or --set worker.codec=raw"),
    # ---- ZeRO
    Refusal("--zero 3", "workers average among themselves",
            "fully_shard's collectives are of processes that stay the same, and workers come and go",
            "--set worker.zero=1 divides optimizer state; in --mode sync the processes of a worker (--group) divide "
            "the model"),
    Refusal("--zero 3", "one process", "stage 3 divides the model among the processes of a worker",
            "ps-launch --group G, or torchrun --nproc-per-node G -m paramserver.worker --group; --set worker.zero=1 "
            "--mode allreduce divides the optimizer state among workers"),
    Refusal("--zero 1", "workers send to the server", "only workers that do can divide the optimizer's state",
            "leave it out, or --mode allreduce; --shards S --colocate divides the server's"),
    Refusal("--zero 1", "outstanding means", "each worker steps by itself along outstanding means",
            "leave one of them out"),
    Refusal("--zero 1", "--codec", "peers encode whole gradients, one step after another",
            "leave one of them out: --set worker.zero=0, or --set worker.codec=raw"),
    # ---- codecs
    Refusal("--codec", "workers send weights", "the codec would lose every small step of them",
            "--set worker.codec={c.codec} for ps-server too: localsgd then averages weight changes; or --mode diloco,"
            " which always does"),
    Refusal("--reply-codec", "workers send weights", "the codec would lose every small step of them",
            "--set worker.reply_codec={c.reply_codec} for ps-server too: localsgd then averages weight changes; or "
            "--mode diloco, which always does"),
    Refusal("reply codec onebit_adam", "workers send to the server",
            "workers approach the server's weights too slowly or never",
            "--set worker.reply_codec=q4 (or int8, bf16)"),
    Refusal("codec onebit_adam", "no rounds of gradients", "it is for rounds in which the server steps",
            "--mode sync; or --set worker.codec=q4"),
    Refusal("codec onebit_adam", "an optimizer other than OneBitAdam", "it needs the optimizer OneBitAdam",
            "--optimizer onebitadam, in a script paramserver.OneBitAdam(model.parameters(), warmup_steps=...); or "
            "--set worker.codec=q4"),
    Refusal("a codec that sends late", "an adaptive optimizer",
            "it divides every gradient by its usual size, and the codec makes most of them 0 or equal; this trains "
            "worse than without a residual (docs/codecs.md)",
            "--mode diloco, which runs this optimizer in the workers; or --set worker.codec=q4"),
    Refusal("a codec of signs", "an optimizer with momentum",
            "it amplifies the values that the codec sends late; this trains worse than without a residual "
            "(docs/codecs.md)", "--mode diloco, which runs this optimizer in the workers; or --set worker.codec=q4"),
    # ---- fragments
    Refusal("--fragments", "a reply codec that rounds", "it encodes only whole replies, and a fragment is sent",
            "--set worker.reply_codec=q4 (or int8, raw), or --fragments 1"),
    Refusal("--fragments", "fully_shard", "each process has a part of every fragment",
            "--fragments 1; or DistributedDataParallel or the unwrapped model in the group"),
    Refusal("--fragments", "--pipeline", "each stage has a part of every fragment", "--fragments 1, or no --pipeline"),
    Refusal("--fragments", "--regions", "a relay overlaps its exchanges by itself", "leave policy.fragments out"),
    # ---- regions
    Refusal("--regions", "--shards", "the server above is one process, and so is the server of a region",
            "leave out --shards and --colocate"),
    Refusal("--regions", "outstanding means", "new weights would come between two delayed steps",
            "--staleness 0, or leave policy.staleness out"),
    Refusal("regions in the mode of the run above", "workers average among themselves",
            "the run above would be in this mode too, and a region has no gradient to average there",
            "--upstream-every 8, or --mode sync"),
    Refusal("regions in the mode of the run above", "gradients without rounds",
            "the run above would take the mean gradient of each round", "--upstream-every 8, or --mode sync"),
    Refusal("--regions", "a run above of peers", "its workers average among themselves",
            "for the server above, use mode sync, localsgd, diloco or async_diloco (--upstream-mode)"),
    Refusal("--upstream-every", "a run above of gradients",
            "it would have to exchange weights every {c.upstream_every} steps, and takes a gradient of every version",
            "leave --upstream-every out, or use localsgd, diloco or async_diloco for the server above"),
    Refusal("no rounds of gradients", "a run above of gradients", "it takes the mean gradient of each round",
            "--mode sync for the region, or localsgd, diloco or async_diloco for the server above"),
    Refusal("a region's server", "--checkpoint-dir", "the run above keeps the state of a region",
            "give --checkpoint-dir to the server above"),
    Refusal("a region's server", "store.polyak", "the server above keeps averaged weights",
            "set store.polyak for the server above"),
    Refusal("--regions", "several optimizers", "a version of a region would have a part of a step",
            "one optimizer, or let the workers join the server above"),
    Refusal("--regions", "session.rows", "the run above would not get the rows",
            "use an nn.Embedding in the model, or let the workers join the server above"),
    # ---- the processes of a worker
    Refusal("--pipeline", "one process", "the stages of a pipeline are the processes of a worker",
            "--group G, with at most one process for each layer"),
    Refusal("--pipeline", "--zero", "both divide the model", "leave one of them out"),
    Refusal("--pipeline", "outstanding means", "they are of whole models", "--staleness 0"),
    Refusal("--pipeline", "a codec among peers", "their payloads are of whole models", "--set worker.codec=raw"),
    Refusal("fully_shard", "workers average among themselves", "they step whole models",
            "--mode sync, in which the server steps; or DistributedDataParallel or the unwrapped model in the group"),
    Refusal("an evaluator", "--group", "an evaluator is one process", "leave one out"),
    Refusal("precision fp16", "--group", "each process would skip other steps",
            "use bf16, which needs no loss scaler"),
    # ---- calls of a script
    Refusal("several optimizers", "fully_shard", "each process has a part of every optimizer's tensors",
            "use one optimizer; or DistributedDataParallel or the unwrapped models"),
    Refusal("several optimizers", "--pipeline", "each stage has a part of every optimizer's tensors",
            "use one optimizer, or no --pipeline"),
    Refusal("session.rows", "an evaluator", "it pulls one version, and rows keep changing", "let a worker evaluate"),
    Refusal("session.rows", "--group", "each process would keep a separate copy of the rows",
            "start each process as a separate worker, without --group"),
    Refusal("session.rows", "workers run the optimizer", "rows need gradients",
            "use --mode sync, async or ssp, or an nn.Embedding in the model"),
    Refusal("session.rows", "several optimizers", "a table cannot tell which of them steps its rows",
            "one optimizer, or an nn.Embedding in the model"),
    # ---- of the launcher
    Refusal("--mode single", "--serve", "there is no server to follow",
            "leave one of them out; ps-serve FILE.safetensors --task NAME serves what --save has written"),
    Refusal("--mode single", "--web", "there is no server and no dashboard",
            "leave one of them out; a run with a server is e.g. -n 1 --mode sync"),
    Refusal("--mode single", "--checkpoint-dir", "there is no server that takes snapshots",
            "train with a server, e.g. -n 1 --mode sync"),
    Refusal("--serve", "a script", "ps-serve needs the model as a task",
            "start it beside the run: ps-serve --server HOST:PORT --task FILE.py:NAME"),
)  # fmt: skip


def refusal(choices: Choices) -> UsageError | None:
    """Return the error of the first pair of capabilities that exclude each other; None where all go together."""
    return next((error for row in REFUSALS if (error := row.error(choices)) is not None), None)


def check(choices: Choices) -> None:
    """Raise UsageError for capabilities that exclude each other."""
    if (error := refusal(choices)) is not None:
        raise error


def choices_of(config: Any, mode: str, **known: Any) -> Choices:
    """Return what the configuration chooses for a mode, with `known` in addition. It loads the mode's file."""
    policy, options = MODES.load(mode), config.policy.options(mode)
    of_mode = ("overlap_steps", "staleness", "late_cut", "fragments")
    values = {name: getattr(options, name) for name in of_mode if hasattr(options, name)}
    values |= {item.name: attrgetter(item.metadata["setting"])(config) for item in fields(Choices) if item.metadata}
    kind = policy.kind
    if not kind.may_lose and (values["codec"], values["reply_codec"]) != ("raw", "raw"):
        kind = ContributionKind.DELTA  # localsgd then averages weight changes
    return Choices(
        mode=mode,
        kind=kind,
        has_rounds=policy.has_rounds,
        policy=policy,
        in_region=config.upstream.server is not None,
        **(values | known),
    )


def check_values(config: Any, mode: str) -> None:
    """Raise UsageError for values of a mode's options that limit each other."""
    options, steps = config.policy.options(mode), config.run.steps
    num, local_steps = getattr(options, "fragments", 1), getattr(options, "local_steps", 1)
    if num > 1 and local_steps % num:
        message = f"policy.fragments is {num}, and policy.local_steps is {local_steps}, no multiple of it"
        raise UsageError(message, fix=f"--local-steps {-(-local_steps // num) * num}, or other --fragments")
    overlap, most = getattr(options, "overlap_steps", None) or 0, local_steps // num
    if overlap > most:
        message = f"policy.overlap_steps is {overlap}, and the next exchange begins {most} local steps later"
        settings = f"policy.local_steps is {local_steps}, policy.fragments {num}"
        raise UsageError(f"{message} ({settings})", fix=f"--overlap-steps {most} or fewer, or more --local-steps")
    outstanding = getattr(options, "staleness", 0) if MODES.load(mode).kind.has_peers else 0
    if steps is not None and outstanding >= steps:
        message = f"policy.staleness is {outstanding}, and the run has {steps} training steps"
        raise UsageError(f"{message}: no step would change the weights", fix="--staleness 1, or more steps")
