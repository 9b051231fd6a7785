"""The processes of one worker: what a stranger finds at their ports, and that it delays no start."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramserver.common.errors import AuthError
from paramserver.tests.certificates import certs, flags
from paramserver.tests.forks import Run
from paramserver.tests.strangers import listens, num_keys, on_other_addresses, silent
from paramserver.worker.conversation.channel import check_plaintext
from paramserver.worker.replica_group.group import Member, Rendezvous

SERVE = ("--mode", "sync", "--workers", "1", "--batch-size", "8", "--steps")


def secured(lab: Path) -> dict[str, str]:
    return {"PS_SECURITY__CA": f"{lab}/ca.crt", "PS_SECURITY__TOKEN_FILE": f"{lab}/token"}


@pytest.mark.parametrize("where", ["one host", "several hosts"])
def test_strangers_find_no_key_and_delay_nobody(run: Run, where: str) -> None:
    """They come when one process waits for the other, and stay."""
    lab = run.folder / "lab"
    certs("init", lab)
    run.serve(*SERVE, "1000000", *flags(lab, "server"))
    env = secured(lab) | ({"LOCAL_WORLD_SIZE": "1"} if where == "several hosts" else {})
    (first,) = run.group(0, 2, absent=1, **env)
    first.until(lambda: len(listens([first.popen.pid])) >= (2 if where == "several hosts" else 1), "its store")
    with silent(listens([first.popen.pid])):
        (second,) = run.group(0, 2, absent=0, is_rest=True, **env)
        second.until(lambda: "step 3" in second.output, "steps")
        found = listens([process.popen.pid for process in run.processes])
        assert on_other_addresses(found) == []
        keys = {address: num_keys(address) for address in listens([first.popen.pid, second.popen.pid])}
        assert set(keys.values()) == {0}, keys


def test_where_there_is_no_token_and_processes_are_on_several_hosts_they_find_each_other(run: Run) -> None:
    run.serve(*SERVE, "10")
    group = run.group(0, 2, LOCAL_WORLD_SIZE="1")
    assert [forked.wait() for forked in group] == [0, 0], group[0].output


def test_only_this_user_can_read_where_processes_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    member = Member(0, 2, ("127.0.0.1", 29500), "0", is_host=True, is_on_one_host=True)
    rendezvous = Rendezvous(member, None)
    secret = rendezvous.publish(("127.0.0.1", 1))
    (folder,) = tmp_path.iterdir()
    (file,) = folder.iterdir()
    assert [item.stat().st_mode & 0o777 for item in (folder, file)] == [0o700, 0o600]
    assert Rendezvous(member._replace(rank=1), None).look_up(1) == (("127.0.0.1", 1), secret)
    rendezvous.leave()
    assert list(folder.iterdir()) == []
    folder.chmod(0o755)
    with pytest.raises(AuthError, match="can be read or written by other users") as raised:
        Rendezvous(member, None)
    assert "set TMPDIR" in str(raised.value.fix)


def test_what_leaves_this_machine_in_the_clear_is_asked_for() -> None:
    check_plaintext("127.0.0.1", "rank 0", False, "")
    check_plaintext("10.0.0.1", "rank 0", True, "")
    with pytest.raises(AuthError, match=r"rank 0 would exchange tensors on 10\.0\.0\.1, which") as raised:
        check_plaintext("10.0.0.1", "rank 0", False, "or take --mode sync")
    assert raised.value.exit_code == 11
    assert "--insecure" in str(raised.value.fix)
