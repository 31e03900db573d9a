"""Edited, cut, rolled back, replaced: the ledger notices, or a witness of it does."""

import json
import shutil
import sqlite3

import pytest

from hush.accounting import Budget, Gaussian
from hush.commands.app import main
from hush.ledger import Head, Ledger, LedgerDamaged, LedgerRolledBack, chain

CAP = Budget(epsilon=3.0, delta=1e-5)
PLAN = {"budget": Budget(epsilon=1.0, delta=1e-6), "units": [(Gaussian(100.0), 100)]}


@pytest.fixture
def path(tmp_path):
    with Ledger(tmp_path / "data.hush", budget=CAP) as ledger:
        account = ledger.open_account("run", **PLAN)
        account.reserve(50)
        account.settle(50)
    return tmp_path / "data.hush"


def edit(path, *commands: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for command in commands:
        assert connection.execute(command).rowcount != 0
    connection.close()


@pytest.mark.parametrize(
    "command",
    [
        """UPDATE entries SET body = replace(body, '"units":50', '"units":5') WHERE sequence = 4""",
        "DELETE FROM entries WHERE sequence = 4",
        "DELETE FROM entries WHERE sequence = 3",
        "UPDATE entries SET sequence = 9 WHERE sequence = 4",
        "UPDATE head SET sequence = 3",
        "DELETE FROM head",
        "INSERT INTO head SELECT * FROM head",
        "INSERT INTO entries VALUES (5, '{}', 'x')",
        "INSERT INTO entries SELECT 5, body, hash FROM entries WHERE sequence = 4",
        "UPDATE entries SET body = x'00ff' WHERE sequence = 4",
        "UPDATE entries SET hash = upper(hash) WHERE sequence = 4",
        "CREATE TRIGGER t BEFORE INSERT ON entries BEGIN SELECT RAISE(IGNORE); END",
        "CREATE TABLE more (a)",
        "PRAGMA application_id = 7",
    ],
)
def test_an_edited_file_is_refused(path, command):
    edit(path, command)
    with pytest.raises(LedgerDamaged, match=r"expected .*; came .*; "):
        Ledger(path)


def test_a_chain_written_anew_is_noticed_by_whoever_has_seen_the_old_one(path):
    """With write access the whole chain can be rewritten; checkpoints and reports still know the old head."""
    with Ledger(path) as ledger:
        seen, entries = ledger.head(), ledger.entries()
    head = chain.EMPTY
    rewritten = []
    for entry in entries:
        fact = entry.fact
        if fact["kind"] in ("reserved", "settled"):
            fact["units"] = 1
        new = chain.write(fact, after=head)
        rewritten.append(f"UPDATE entries SET body = '{new.body}', hash = '{new.hash}' WHERE sequence = {new.sequence}")
        head = new.head
    edit(path, *rewritten, f"UPDATE head SET hash = '{head.hash}'")
    with pytest.raises(LedgerRolledBack, match="its witness file has seen"):
        Ledger(path)
    path.with_name("data.hush-head").unlink()
    Ledger(path).close()  # nothing beside the file knows better
    with pytest.raises(LedgerRolledBack, match="a checkpoint or report has seen"):
        Ledger(path, seen=seen)


def test_an_older_copy_is_refused(path, tmp_path):
    shutil.copy(path, tmp_path / "backup")
    with Ledger(path) as ledger:
        account = ledger.resume_account("run")
        account.reserve(80)
        seen = account.head()
    shutil.copy(tmp_path / "backup", path)
    with pytest.raises(LedgerRolledBack, match="put back the newest copy"):
        Ledger(path)
    with pytest.raises(LedgerRolledBack), Ledger(tmp_path / "backup") as other:
        other.resume_account("run", seen=seen)
    with pytest.raises(LedgerRolledBack):
        Ledger(tmp_path / "backup", seen=seen)


def test_a_lost_journal_is_noticed(path, tmp_path):
    """Entries that SQLite still keeps in its -wal file, which somebody takes for rubbish."""
    with Ledger(path) as ledger:
        ledger.resume_account("run").reserve(80)
        copy = tmp_path / "copy"
        copy.mkdir()
        for name in ("data.hush", "data.hush-head"):  # and not data.hush-wal
            shutil.copy(path.with_name(name), copy / name)
        with pytest.raises(LedgerRolledBack, match="its witness file has seen"):
            Ledger(copy / "data.hush")
        shutil.copy(path.with_name("data.hush-wal"), copy)
        with Ledger(copy / "data.hush") as whole:
            assert whole.pages()[0].spent >= 80


def test_a_removed_ledger_is_not_begun_anew_unnoticed(path):
    path.unlink()
    with pytest.raises(LedgerRolledBack, match="what was spent is then forgotten"):
        Ledger(path, budget=CAP)
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0", b"not a ledger", bytes(8192)])
def test_what_is_no_ledger_is_refused_and_left_alone(tmp_path, content):
    (tmp_path / "l").write_bytes(content)
    with pytest.raises(LedgerDamaged):
        Ledger(tmp_path / "l", budget=CAP)
    assert (tmp_path / "l").read_bytes() == content


def test_another_database_is_refused_and_left_alone(tmp_path):
    connection = sqlite3.connect(tmp_path / "other.db")
    connection.execute("CREATE TABLE patients (name)")
    connection.commit()
    connection.close()
    with pytest.raises(LedgerDamaged, match="another or an altered database"):
        Ledger(tmp_path / "other.db")


def test_a_folder_that_is_not_there_is_said(tmp_path):
    from hush.ledger import LedgerUnwritable

    with pytest.raises(LedgerUnwritable, match="No such file or directory"):
        Ledger(tmp_path / "nowhere" / "l")
    with pytest.raises(LedgerUnwritable):
        Ledger(tmp_path)
    with pytest.raises(LedgerUnwritable):  # a run that resumes never makes a new ledger
        Ledger(tmp_path / "l", seen=Head(3, "0" * 64))


def test_an_entry_of_a_later_version_is_refused(path):
    with Ledger(path) as ledger:
        entry = chain.write({"kind": "gifted", "units": 7}, after=ledger.head())
    edit(path, f"INSERT INTO entries VALUES ({entry.sequence}, '{entry.body}', '{entry.hash}')")
    edit(path, f"UPDATE head SET sequence = {entry.sequence}, hash = '{entry.hash}'")
    with pytest.raises(LedgerDamaged, match="unknown kind 'gifted'"):
        Ledger(path)


def test_another_process_truncating_the_file_under_us_is_noticed(path):
    with Ledger(path) as ledger:
        account = ledger.resume_account("run")
        account.reserve(70)
        edit(path, "DELETE FROM entries WHERE sequence >= 5", "UPDATE head SET sequence = 4")
        with pytest.raises(LedgerDamaged):
            account.reserve(100)


def test_a_head_is_read_only_in_its_own_form():
    head = Head(4, "ab" * 32)
    assert Head.from_dict(json.loads(json.dumps(head.to_dict()))) == head
    for broken in ({}, {"sequence": "4", "hash": "ab" * 32}, {"sequence": True, "hash": "ab" * 32}, {"sequence": 4}):
        with pytest.raises(LedgerDamaged):
            Head.from_dict(broken)


def test_the_command_line_shows_checks_closes_and_links(path, capsys):
    def hush(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["ledger", *words])
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    shown = json.loads(hush("show", str(path), "--json")[1])
    assert shown["cap"] == {"epsilon": 3.0, "delta": 1e-5} and shown["accounts"][0]["units_spent"] == 50
    assert 0 < shown["spent"]["epsilon_lower"] <= shown["spent"]["epsilon"] <= 1
    assert "run: 50 of 100 units, open" in hush("show", str(path))[1]
    head = f"{shown['head']['sequence']}:{shown['head']['hash']}"
    assert hush("check", str(path), "--head", head)[0] == 0
    assert hush("check", str(path), "--head", "4:" + "0" * 64)[0] == 2
    assert json.loads(hush("close", str(path), "run", "--json")[1])["accounts"][0]["closed"]
    assert hush("open", str(path))[0] == 2
    assert hush("open", str(path.with_name("new.hush")), "--epsilon", "1", "--delta", "1e-6", "--rule", "renyi")[0] == 0
    for wrong in (("show", "nowhere"), ("close", str(path), "run"), ("link", str(path), "7", "--reason", "x")):
        code, _, error = hush(*wrong)
        assert code == 2 and error.startswith("hush: expected") and error.count("\n") == 1
    path.write_bytes(path.read_bytes()[:5000])
    assert "Traceback" not in hush("show", str(path))[2]
