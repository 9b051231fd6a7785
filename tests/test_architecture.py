"""Who may import whom: the table of docs/architecture.md, read from the sources.

Imports inside functions count; those under TYPE_CHECKING do not, they never run.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

from paramserver.common.kinds import ContributionKind
from paramserver.common.registry import MODE_ALIASES, MODES
from paramserver.drills.history_lines import FIELDS
from paramserver.tests.code_lines import PRODUCT, code_lines, lines_by_package

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "proto", "common", "ps", "worker", "launch", "integrations", "drills", "simulate", "benchmarks", "web", "catalog",
    "serve", "relay",
)  # fmt: skip
GENERATED = {"proto/parameter_server_pb2.py", "proto/parameter_server_pb2_grpc.py"}

FILES = [
    "__init__.py",
    *sorted(
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.relative_to(ROOT).as_posix() not in GENERATED
    ),
]

EVERY_FILE = [*FILES, *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py"))]

# Time, chance, threads and output come in as arguments or go out as values.
PURE = [
    "common/config/option.py", "common/config/plain.py", "common/kinds.py", "common/wire/records.py", "ps/policies/*",
    "ps/core/*", "worker/session.py", "launch/plan/*", "launch/supervise/*",
    "ps/snapshots/common.py", "simulate/machines/links.py",
]  # fmt: skip
IMPURE = {"torch", "numpy", "grpc", "paramserver.proto", "time", "random", "threading", "asyncio", "os", "logging"}

TENSOR_WORK = [
    "ps/snapshots/store_state.py", "ps/tensors/flat_optimizer.py", "ps/snapshots/manifest.py", "ps/snapshots/files.py",
    "ps/snapshots/available.py", "ps/snapshots/resharding.py", "ps/tensors/store.py", "ps/tensors/sanity.py",
    "ps/tensors/aggregation/*", "common/codecs/*", "common/tensors/layout.py", "common/tensors/sharding.py",
    "common/tensors/tables.py", "worker/training/rows.py", "common/tensors/optimizers.py", "worker/tasks/*",
    "drills/tasks/*", "worker/training/tasks/loading.py", "worker/trainer.py", "worker/tensors/transfer.py",
    "worker/tensors/staged.py", "worker/training/data.py", "worker/training/optimizer.py",
]  # fmt: skip
WIRE = {"grpc", "grpc_health", "grpc_reflection", "google.protobuf", "paramserver.proto"}

# The only files that know gRPC, and those that know the messages alone.
GRPC_USERS = {
    "ps/wire/service.py", "ps/wire/conversation.py", "ps/wire/joining.py", "ps/wire/stream.py", "ps/health.py",
    "ps/wire/security.py", "ps/shards/attend.py", "ps/shards/link.py", "worker/conversation/channel.py",
    "worker/conversation/shard_set.py", "worker/conversation/stream_client.py", "common/wire/protocol.py",
}  # fmt: skip
MESSAGE_USERS = {
    "worker/conversation/messages.py", "ps/wire/delivery.py", "ps/wire/receiver.py",
    "ps/wire/partial_transfers.py", "worker/transports/transport.py", "common/wire/checks.py", "common/wire/frames.py",
    "common/wire/messages.py", "common/wire/segments.py",
}  # fmt: skip
WIRE_USERS = GRPC_USERS | MESSAGE_USERS


def matching(patterns: list[str]) -> list[str]:
    return [name for name in FILES if any(Path(name).match(pattern) for pattern in patterns)]


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that can run: all but the bodies of `if TYPE_CHECKING`."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, ast.If) and is_type_checking(node.test):
            stack.extend(node.orelse)
        else:
            stack.extend(ast.iter_child_nodes(node))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(text_of(name))


@cache
def imports_of(name: str, source: str | None = None) -> frozenset[str]:
    """Absolute names of everything a file imports when it runs, also one by one from a package, also by importlib."""
    tree = ast.parse(source) if source is not None else tree_of(name)
    return frozenset(imported_by(name, running_nodes(tree)))


@cache
def mentions_of(name: str) -> frozenset[str]:
    """What a file imports, also under TYPE_CHECKING."""
    return frozenset(imported_by(name, ast.walk(tree_of(name))))


def imported_by(name: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    package = ["paramserver", *Path(name).parent.parts]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant):
                yield str(argument.value)


def in_folder(folder: str) -> list[str]:
    return [name for name in FILES if name.startswith(f"{folder}/")]


def breaches(names: Iterable[str], roots: set[str]) -> dict[str, list[str]]:
    """What the named files import of `roots`, by file; those that do not are left out."""
    return {name: found for name in names if (found := forbidden_in(name, roots))}


def forbidden_in(name: str, roots: set[str], source: str | None = None) -> list[str]:
    return sorted(
        imported
        for imported in imports_of(name, source)
        if any(imported == root or imported.startswith(root + ".") for root in roots)
    )


# ---- the table -----------------------------------------------------------------------------------


def test_pure_code_has_no_clock_no_chance_no_threads_no_wire() -> None:
    assert breaches(matching(PURE), IMPURE | WIRE) == {}


def test_tensor_work_knows_no_wire() -> None:
    assert breaches(matching(TENSOR_WORK), WIRE | {"asyncio"}) == {}


def test_only_a_few_files_know_grpc_and_the_messages() -> None:
    others = [name for name in FILES if name not in WIRE_USERS]
    assert breaches((name for name in others if not name.startswith("benchmarks/")), WIRE) == {}
    assert breaches(in_folder("benchmarks"), {"paramserver.proto"}) == {}


def test_messages_are_independent_of_the_transport() -> None:
    assert breaches(MESSAGE_USERS, {"grpc", "asyncio", "threading", "time"}) == {}


# What starts and tries the programs; the programs know nothing of it.
OUTSIDE = {"paramserver.launch", "paramserver.drills", "paramserver.benchmarks", "paramserver.integrations"}
OUTSIDE |= {"paramserver.catalog", "paramserver.simulate", "paramserver.serve", "paramserver.relay"}


def test_the_server_knows_no_worker_and_no_launcher() -> None:
    found = breaches(in_folder("ps"), {"paramserver.worker", *OUTSIDE})
    # With --upstream the program is a relay, which is loaded then.
    assert found.pop("ps/main.py") == ["paramserver.relay.server", "paramserver.relay.server.relay_server"]
    assert found == {}


def test_a_relay_knows_a_server_and_how_a_worker_talks() -> None:
    allowed = (
        "ps",
        "worker.conversation",
        "worker.strategies",
        "worker.tensors",
        "common",
        "relay",
        "worker.training.readings",
    )
    imported = {item for name in in_folder("relay") for item in imports_of(name) if item.startswith("paramserver.")}
    assert [
        item for item in sorted(imported) if not item.startswith(tuple(f"paramserver.{name}" for name in allowed))
    ] == []
    others = [name for name in FILES if not name.startswith("relay/") and name != "ps/main.py"]
    assert breaches(others, {"paramserver.relay"}) == {}


def test_the_worker_knows_no_server_and_no_launcher() -> None:
    assert breaches(in_folder("worker"), {"paramserver.ps", *OUTSIDE}) == {}


def test_an_integration_is_a_script_of_its_own() -> None:
    """It knows what a script knows: connect() and the session."""
    roots = {"paramserver.ps", "paramserver.worker", *OUTSIDE} - {"paramserver.integrations"}
    found = {item for breach in breaches(in_folder("integrations"), roots).values() for item in breach}
    found = {breach for breach in found if not breach.startswith("paramserver.worker.training.session")}
    assert found <= {"paramserver.worker.api", "paramserver.worker.api.connect"}
    assert [name for name in in_folder("integrations") if re.search(r"session\._\w", text_of(name))] == []


def test_the_launcher_loads_nothing_heavy() -> None:
    """What it dispatches to (`ps-launch check`, `ps-launch chaos`) it knows by name only."""
    heavy = {"torch", "numpy", "safetensors"}
    others = {"paramserver.ps", "paramserver.worker", "paramserver.drills", "paramserver.benchmarks"}
    assert breaches(in_folder("launch"), WIRE | heavy | others) == {}


def test_drills_know_the_launcher_and_the_rules_of_a_mode() -> None:
    """They look at a run from outside: its processes, its history, its weights. Only a task is the worker's."""
    scripts = {*in_folder("drills/tasks"), "drills/doctor/probe.py", "drills/doctor/stages.py"}
    outside = sorted({*in_folder("drills")} - scripts)
    assert breaches(outside, WIRE | {"torch", "numpy", "paramserver.worker", "paramserver.benchmarks"}) == {}
    ours = {item for breach in breaches(outside, {"paramserver.ps"}).values() for item in breach}
    assert [breach for breach in ours if not breach.startswith("paramserver.ps.policies")] == []


def test_only_the_page_knows_its_server() -> None:
    others = [name for name in FILES if not name.startswith(("web/", "serve/"))]
    assert breaches(others, {"starlette", "uvicorn", "websockets"}) == {}


def test_the_page_knows_no_server_and_no_worker() -> None:
    """It shows what it is told, of types that belong to nobody."""
    theirs = WIRE | {"torch", "numpy", "paramserver.ps", "paramserver.worker", *OUTSIDE}
    assert breaches(in_folder("web"), theirs) == {}


def test_serving_knows_how_a_worker_reads_a_run_and_no_package_knows_serving() -> None:
    allowed = ["worker.conversation", "worker.tensors", "worker.training.tasks", "web", "common", "serve"]
    allowed += ["worker.replica_group.cut", "worker.replica_group.redistribution", "worker.training.pipeline"]
    imported = {item for name in in_folder("serve") for item in imports_of(name) if item.startswith("paramserver.")}
    roots = tuple(f"paramserver.{name}" for name in allowed)
    assert [item for item in sorted(imported - {"paramserver.worker"}) if not item.startswith(roots)] == []
    others = [name for name in FILES if not name.startswith(("serve/", "benchmarks/"))]
    assert breaches(others, {"paramserver.serve"}) == {}


HEAVY = ("torch", "numpy", "grpc", "google.protobuf", "safetensors", "structlog", "starlette", "uvicorn", "websockets")
HEAVY += ("sqlite3", "cryptography", "prometheus_client")
COMMANDS = {
    "ps-server": "paramserver.ps.main", "ps-worker": "paramserver.worker.main", "ps-launch": "paramserver.launch.main",
    "ps-launch doctor": "paramserver.launch.main", "ps-launch chaos": "paramserver.launch.main",
    "ps-launch check": "paramserver.launch.main", "ps-sim": "paramserver.simulate.main",
    "ps-runs": "paramserver.catalog.main", "ps-certs": "paramserver.launch.certs.main",
    "ps-bench": "paramserver.benchmarks.main", "ps-serve": "paramserver.serve.main",
}  # fmt: skip
# Found when the configuration is read, which these commands do.
UNKNOWN_KEY, NO_OPTIMIZER = "--set run.made_up=1", "--optimizer made-up"
OF_THE_CONFIGURATION = [
    *((name, UNKNOWN_KEY) for name in ("ps-server", "ps-worker", "ps-launch", "ps-sim configs/digits.yaml")),
    *((name, NO_OPTIMIZER) for name in ("ps-server", "ps-launch")),
    ("ps-launch doctor configs/digits.yaml", UNKNOWN_KEY),
    *(("ps-launch", words) for words in ("--mode made-up", "--task made-up", "--backend made-up")),
    ("ps-launch", "--set worker.codec=made-up"),
    ("ps-worker", "--task made_up.py:Task"),
    ("ps-worker", "--init made-up.safetensors"),
    ("ps-launch", "--task made_up.py:Task"),
]


@pytest.mark.parametrize(
    ("command", "arguments", "code"),
    [*((name, word, code) for name in COMMANDS for word, code in (("--help", 0), ("--made-up", 2)))]
    + [(name, words, 2) for name, words in OF_THE_CONFIGURATION],
)
def test_a_mistake_is_answered_without_what_is_heavy(command: str, arguments: str, code: int) -> None:
    """Each command as it is typed: a wrong flag, an unknown key and --help load neither torch nor gRPC."""
    program_name = " ".join(word for word in command.split() if not word.endswith(".yaml"))
    program = (
        f"import atexit, sys; sys.argv = {[*command.split(), *arguments.split()]}\n"
        f"atexit.register(lambda: print('\\n', [name for name in {HEAVY} if name in sys.modules]))\n"
        f"from {COMMANDS[program_name]} import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.endswith("\n []\n"), done.stdout[-300:]
    assert done.returncode == code, done.stderr
    assert arguments.split()[-1].partition("=")[0].removeprefix("run.") in done.stdout + done.stderr


def test_a_simulation_needs_no_torch_and_no_network() -> None:
    """The run's rules and the modes do without, so that it starts at once."""
    heavy = ("torch", "numpy", "grpc", "google.protobuf", "asyncio")
    imports = "paramserver.simulate.main, paramserver.simulate.plan, paramserver.simulate.results.summary"
    code = f"import sys, {imports}; print([name for name in {heavy} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"


def test_common_code_belongs_to_nobody() -> None:
    assert breaches(in_folder("common"), {"paramserver.ps", "paramserver.worker", *OUTSIDE}) == {}


@pytest.mark.parametrize(
    "name", ["ps/wire/conversation.py", "ps/wire/receiver.py", "worker/conversation/stream_client.py"]
)
def test_translators_know_no_policy(name: str) -> None:
    """They may name the facts of a contribution, not look into a mode."""
    allowed = {"paramserver.ps.policies.base", "paramserver.ps.policies.base.Contribution"}
    assert set(forbidden_in(name, {"paramserver.ps.policies"})) <= allowed


def test_a_mode_imports_modes_and_what_options_are_made_of_only() -> None:
    """One file in this folder is a mode: whoever writes one needs nothing else of ours."""
    known = (
        "paramserver.ps.policies",
        "paramserver.common.config.option",
        "paramserver.common.kinds",
        "paramserver.common.wire.records",
    )
    modes = matching(["ps/policies/*"])
    ours = {item for breach in breaches(modes, {"paramserver"}).values() for item in breach}
    assert [breach for breach in ours if not breach.startswith(known)] == []
    theirs = {imported.split(".")[0] for name in modes for imported in imports_of(name)}
    theirs -= {"paramserver", "pydantic"}
    assert theirs <= set(sys.stdlib_module_names), "of others' pydantic only, for a mode's options"


# ---- rooms ---------------------------------------------------------------------------------------

# From the lowest; an import goes down or sideways.
ROOMS_OF_THE_SERVER = ["policies", "core", "tensors", "snapshots", "engine", "observe", "wire", "shards"]
ROOMS_OF_THE_SERVER += ["server", "health", "main", "__main__"]


def room_of(module: str) -> int | None:
    """The place of `paramserver.ps.ROOM...` in the order; None for what is not of the server."""
    parts = module.split(".")
    if parts[:2] != ["paramserver", "ps"] or len(parts) < 3:
        return None
    return ROOMS_OF_THE_SERVER.index(parts[2])


def test_no_import_runs_up() -> None:
    up = []
    for name in in_folder("ps")[1:]:  # all but the package's own __init__.py, the first
        here = room_of("paramserver." + name.removesuffix(".py").replace("/", "."))
        assert here is not None, name
        up += [(name, imported) for imported in imports_of(name) if (room_of(imported) or 0) > here]
    assert up == []


# ---- what is nowhere -------------------------------------------------------------------------------


def test_kinds_of_contribution_are_compared_in_one_file() -> None:
    """Everybody else asks a kind what follows from it (`common/kinds.py`)."""
    kinds = {kind.value for kind in ContributionKind}
    found = []
    for name in FILES:
        for node in ast.walk(tree_of(name)) if name != "common/kinds.py" else ():
            if not isinstance(node, ast.Compare):
                continue
            for side in (node.left, *node.comparators):
                values = [side, *(side.elts if isinstance(side, ast.Tuple | ast.Set | ast.List) else ())]
                is_text = any(isinstance(elt, ast.Constant) and elt.value in kinds for elt in values)
                if is_text or any(ast.unparse(elt).startswith("ContributionKind.") for elt in values):
                    found.append((name, ast.unparse(node)))
    assert found == []


def test_nothing_is_pickled() -> None:
    """No pickle and no torch.load or torch.save, which are pickle too: nobody's bytes run code here."""
    assert breaches(FILES, {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}) == {}
    loads = {"torch.load", "torch.save", "torch.hub.load", "eval", "yaml.unsafe_load", "yaml.full_load"}
    loaders = {"yaml.Loader", "yaml.FullLoader", "yaml.UnsafeLoader"}
    found = []
    for name in FILES:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.Call | ast.Attribute):
                mentioned, forbidden = (node.func, loads) if isinstance(node, ast.Call) else (node, loaders)
                if isinstance(mentioned, ast.Name | ast.Attribute) and ast.unparse(mentioned) in forbidden:
                    found.append((name, ast.unparse(node)))
    assert found == []


def test_every_tensor_of_ours_names_its_device() -> None:
    """torch.set_default_device of a user's script must not move tensors of worker/ and common/."""
    names = {constructor.__name__ for constructor in _device_constructors()}
    found = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name in FILES
        if name.startswith(("worker/", "common/", "integrations/"))
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in names
        and "device" not in [keyword.arg for keyword in node.keywords]
    ]
    assert found == []


# What reads JSON with Python's own parser: programs whose source is sent alone, and what reads what it wrote itself.
READS_ITS_OWN = {
    "common/wire/json_text.py", "launch/hosts/agent.py", "launch/hosts/host_check.py", "launch/hosts/ray_job.py",
    "ps/core/state.py", "simulate/recorded/replay.py", "web/app.py",
}  # fmt: skip


def test_json_of_other_processes_has_one_reader() -> None:
    readers = [name for name in FILES if re.search(r"\bjson\.loads?\(", text_of(name))]
    assert [name for name in readers if name not in READS_ITS_OWN and not name.startswith("benchmarks/")] == []


MODE_NAMES = {*MODES.names(), *MODE_ALIASES}


def mode_comparisons(tree: ast.Module) -> list[str]:
    """Comparisons and match cases against the name of a mode."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides: list[ast.AST] = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            sides = list(node.args)
        else:
            continue
        constants = [inner for side in sides for inner in ast.walk(side) if isinstance(inner, ast.Constant)]
        if any(constant.value in MODE_NAMES for constant in constants if isinstance(constant.value, str)):
            found.append(f"line {node.lineno if hasattr(node, 'lineno') else '?'}: {ast.unparse(node)}")
    return found


def test_no_code_asks_which_mode_it_is() -> None:
    """The mode lives in its one file; everything else asks the policy what it wants."""
    others = [name for name in FILES if not name.startswith("ps/policies/")]
    assert {name: found for name in others if (found := mode_comparisons(tree_of(name)))} == {}


# ---- rooms ------------------------------------------------------------------------------------------

ROOMY = ("common", "ps", "worker", "launch", "integrations", "drills", "simulate", "benchmarks", "catalog")


@pytest.mark.parametrize("package", ROOMY)
def test_no_files_import_each_other_in_a_circle(package: str) -> None:
    assert circle_in(package, imports_of) == []


@pytest.mark.parametrize("package", ["common", "worker/training"])
def test_no_files_name_each_others_types_in_a_circle(package: str) -> None:
    """Imports within functions and under TYPE_CHECKING count too: files that know each other are one file."""
    assert circle_in(package, mentions_of) == []


def circle_in(package: str, imports: Callable[[str], frozenset[str]]) -> list[str]:
    """The files of a package that import each other in a circle, and those that import them."""
    modules = {"paramserver." + name.removesuffix(".py").replace("/", "."): name for name in FILES}
    waiting = {
        name: {modules[imported] for imported in imports(name) if imported in modules} - {name}
        for name in in_folder(package)
    }
    while free := [name for name, imported in waiting.items() if not imported & waiting.keys()]:
        for name in free:
            del waiting[name]
    return sorted(waiting)


def test_every_script_that_a_test_starts_is_there() -> None:
    """Also those of tests that only campaigns run; none hides a module of Python from what it imports."""
    start = re.compile(
        r"""(?:\.script\(\w+, |with_name\(|"scripts" / |parents\[\d\] / "\w+" / "\w+" / )["'](\w+\.py)["']"""
    )
    named = {name: start.findall(text_of(name)) for name in EVERY_FILE if name.startswith("tests/")}
    present = {Path(name).name for name in EVERY_FILE} | {path.name for path in (ROOT / "examples").iterdir()}
    missing = {name: script for name, found in named.items() for script in found if script not in present}
    assert missing == {}
    assert sum(map(len, named.values())) > 40
    assert [name for name in EVERY_FILE if "tests" in name and Path(name).stem in sys.stdlib_module_names] == []


# ---- size and names ----------------------------------------------------------------------------------

# Lines of code; `python tests/code_lines.py` prints today's. A limit is lowered when its package shrinks.
MAX_PRODUCT_LINES = 43_481
MAX_TEST_LINES = 46_391


def test_the_lines_of_code_stay_within_their_limits() -> None:
    product = lines_by_package(*PRODUCT)
    assert sum(product.values()) <= MAX_PRODUCT_LINES, product
    assert lines_by_package("tests")["tests"] <= MAX_TEST_LINES


# Words that the field has other words for; docs/architecture.md has the glossary.
RETIRED = {
    "Among", "Crew", "Equals", "Lane", "Meeting", "Pulse", "STEP_GAP", "bringer", "crew", "heart", "inner_rank", "kin",
    "lane", "lanes", "meeting", "one", "ones", "pipelined", "pulse", "tape", "whoever",
}  # fmt: skip
# Words that name neither a type nor a role, and how many names of each package are still spelled so.
VAGUE = {"told", "said", "held", "own", "what", "place", "placed", "half", "figures"}
MAX_VAGUE = {
    "tests": 5,
}  # fmt: skip


def bound_names(tree: ast.AST) -> Iterator[str]:
    """The names that a file gives to variables, arguments, attributes, functions and classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name.strip("_")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name.strip("_")


@cache
def names_of(name: str) -> Counter[str]:
    return Counter(bound_names(tree_of(name)))


def test_no_name_is_a_retired_word_and_vague_names_become_fewer() -> None:
    assert {name: words for name in EVERY_FILE if (words := sorted(RETIRED & names_of(name).keys()))} == {}
    counts = dict.fromkeys(MAX_VAGUE, 0)
    for name in EVERY_FILE:
        package = name.partition("/")[0]
        counts[package] = counts.get(package, 0) + sum(names_of(name)[word] for word in VAGUE)
    assert {package: count for package, count in counts.items() if count > MAX_VAGUE.get(package, 0)} == {}


def test_step_counts_training_steps_and_seq_contributions() -> None:
    messages = re.split(r"^message ", text_of("proto/parameter_server.proto"), flags=re.MULTILINE)[1:]
    with_a_step = sorted(body.split()[0] for body in messages if re.search(r" step = \d+;", body))
    assert with_a_step == ["Metrics", "Position", "StatusReply"]
    assert not [line for fields in FIELDS.values() for line in fields.values() if re.search(r"\bsteps?\b", line)]


# Attributes of an attribute of the engine that code of the server uses: what a class uses often, it is given.
MAX_REACHES = 16


def test_few_places_reach_through_the_engine() -> None:
    chain = r"(?<![\w.])(?:self\.)?_?engine(?:\.[a-z_]+){2,}"
    found = [(name, reach) for name in in_folder("ps") for reach in re.findall(chain, text_of(name))]
    assert len(found) <= MAX_REACHES, found


# Places in tests that reach for a private attribute of something else than self. `_replace` and `os._exit` are public.
MAX_PRIVATE = 110


def private_uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not re.fullmatch("_[a-zA-Z](.*[^_])?", node.attr):
            continue
        if ast.unparse(node.value) not in ("self", "cls", "super()", "os") and node.attr != "_replace":
            yield ast.unparse(node)


def test_tests_use_the_public_side() -> None:
    found = [(name, use) for name in EVERY_FILE if name.startswith("tests/") for use in private_uses(tree_of(name))]
    assert len(found) <= MAX_PRIVATE, found


# ---- the reader itself -------------------------------------------------------------------------------


def test_the_table_names_files_that_exist() -> None:
    assert set(FILES) >= WIRE_USERS
    for pattern in PURE + TENSOR_WORK:
        assert matching([pattern]), f"{pattern} matches nothing"
    assert len(FILES) > 50


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import time", ["time"]),
        ("import time as t, json", ["time"]),
        ("from time import monotonic", ["time", "time.monotonic"]),
        ("def f():\n    import time", ["time"]),
        ("class A:\n    def f(self):\n        from time import sleep", ["time", "time.sleep"]),
        ("import timeit", []),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import time", []),
        ("import typing\nif typing.TYPE_CHECKING:\n    pass\nelse:\n    import time", ["time"]),
        ("import importlib\nimportlib.import_module('time')", ["time"]),
        ("__import__('time')", ["time"]),
        ("from ..proto import x as pb", ["paramserver.proto", "paramserver.proto.x"]),
        ("from .. import proto", ["paramserver.proto"]),
        ("from paramserver.proto import x", ["paramserver.proto", "paramserver.proto.x"]),
        ("from google.protobuf import struct_pb2", ["google.protobuf", "google.protobuf.struct_pb2"]),
    ],
)
def test_imports_are_found_wherever_they_are(source: str, expected: list[str]) -> None:
    assert forbidden_in("ps/anything.py", {"time", "paramserver.proto", "google.protobuf"}, source) == expected


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("if mode == 'ssp': pass", 1),
        ("if 'async' != config.run.mode: pass", 1),
        ("if mode in ('sync', 'x'): pass", 1),
        ("match mode:\n    case 'localsgd': pass", 1),
        ("x = 1 if mode == 'bsp' else 2", 1),
        ("mode.startswith('local')", 0),
        ("if mode == other: pass", 0),
        ("print('sync')", 0),
    ],
)
def test_comparisons_with_a_mode_are_found(source: str, count: int) -> None:
    assert len(mode_comparisons(ast.parse(source))) == count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("", 0),
        ('"""Two\nlines."""\n\nX = 1  # a comment\n', 1),
        ("# only\n# comments\n", 0),
        ('def f(\n    a,\n):\n    """Text."""\n    return """a\nb"""\n', 5),
    ],
)
def test_lines_of_code_are_counted_without_comments_and_docstrings(source: str, count: int) -> None:
    assert code_lines(source) == count
