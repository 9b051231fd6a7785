"""The generated code and the proto it was generated from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paramserver.common.errors import Reason
from paramserver.proto import parameter_server_pb2 as pb

ROOT = Path(__file__).parents[3]


def test_the_committed_protobuf_code_is_generated_from_the_proto(tmp_path: Path) -> None:
    """As `make proto` does it; fails when somebody edits one without the other."""
    pytest.importorskip("grpc_tools")
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-Iparamserver/proto=proto", *outputs,
         "paramserver/proto/parameter_server.proto"],
        cwd=ROOT, check=True, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    generated = {path.name: path.read_text() for path in (tmp_path / "paramserver/proto").iterdir()}
    assert len(generated) == 3
    for name, text in generated.items():
        assert (ROOT / "proto" / name).read_text() == text, f"proto/{name} is not what the proto gives: run make proto"
    makefile = (ROOT / "Makefile").read_text()
    assert "-Iparamserver/proto=proto --python_out" in makefile
    assert "paramserver/proto/parameter_server.proto" in makefile


def test_refusals_of_the_proto_are_those_of_the_code() -> None:
    """REASON_X in the proto and Reason.X in errors.py are one list."""
    names = {name.removeprefix("REASON_") for name in pb.Reason.keys()} - {"UNSPECIFIED"}  # noqa: SIM118
    assert names == {reason.value for reason in Reason}
