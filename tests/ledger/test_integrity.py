"""Edited, cut, rolled back, replaced: the ledger notices, or a witness of it does."""

import json
import os
import shutil
import sqlite3
import time

import pytest

from hush.accounting import Budget, Gaussian
from hush.commands.app import main
from hush.ledger import (
    Head,
    Ledger,
    LedgerDamaged,
    LedgerMissing,
    LedgerRolledBack,
    LedgerUnwritable,
    chain,
    file_format,
)

CAP = Budget(epsilon=3.0, delta=1e-5)
PLAN = {"budget": Budget(epsilon=1.0, delta=1e-6), "units": [(Gaussian(100.0), 100)]}


@pytest.fixture
def path(tmp_path):
    with Ledger(tmp_path / "data.hush", budget=CAP) as ledger:
        account = ledger.open_account("run", **PLAN)
        account.spend_up_to(50)
        account.settle()
    return tmp_path / "data.hush"


def lines_of(path) -> list[bytes]:
    return path.read_bytes().split(b"\n")


def edit(path, change) -> None:
    lines = lines_of(path)
    change(lines)
    path.write_bytes(b"\n".join(lines))


def chain_of(facts) -> list[chain.Entry]:
    head, entries = chain.EMPTY, []
    for fact in facts:
        entries.append(chain.write(fact, after=head))
        head = entries[-1].head
    return entries


def write_anew(path, facts) -> None:
    """What a person with write access can do: another chain, with its heads."""
    entries = chain_of(facts)
    lines = b"".join(file_format.line(entry) for entry in entries)
    path.write_bytes(file_format.MAGIC + 2 * file_format.head_line(entries[-1].head) + lines)


# Lines: 0 what it is, 1 and 2 heads, 3 created, 4 opened, 5 reserved, 6 settled, 7 nothing.
EDITS = {
    "a number changed": lambda lines: lines.__setitem__(5, lines[5].replace(b'"units":6', b'"units":5')),
    "the last entry removed": lambda lines: lines.pop(6),
    "an entry removed": lambda lines: lines.pop(5),
    "entries exchanged": lambda lines: lines.__setitem__(slice(5, 7), [lines[6], lines[5]]),
    "an entry twice": lambda lines: lines.insert(5, lines[5]),
    "the last entry cut": lambda lines: lines.__setitem__(slice(6, 8), [lines[6][:-9]]),
    "the last line end cut": lambda lines: lines.pop(7),
    "a hash in capitals": lambda lines: lines.__setitem__(6, lines[6][:64].upper() + lines[6][64:]),
    "the heads removed": lambda lines: lines.__setitem__(slice(1, 3), [b"", b""]),
    "the heads forged": lambda lines: lines.__setitem__(slice(1, 3), [lines[1].replace(b"head 0", b"head 1")] * 2),
    "not its kind": lambda lines: lines.__setitem__(0, b"hush-ledger 3"),
    "line ends of another system": lambda lines: lines.__setitem__(slice(None), [line + b"\r" for line in lines]),
    "a byte that is no text": lambda lines: lines.__setitem__(4, lines[4].replace(b"run", b"r\xffn")),
}


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS.keys())
def test_an_edited_file_is_refused(path, change):
    before = path.read_bytes()
    edit(path, change)
    assert path.read_bytes() != before
    with pytest.raises(LedgerDamaged, match=r"expected .*; came .*; "):
        Ledger(path)


def test_what_lies_behind_the_last_entry_never_counts(path):
    """A torn entry, or somebody's line: not part of the chain, and overwritten by the next charge."""
    with Ledger(path) as ledger:
        fact = {"kind": "reserved", "account": "run", "units": 90, "at": "2026-01-01T00:00:00"}
        stray = chain.write(fact, after=chain.Head(9, ledger.head().hash))
    with open(path, "ab") as file:
        file.write(file_format.line(stray) + b"\xff" * 300)
    with Ledger(path) as ledger:
        assert ledger.accounts()[0].spent == 50
        assert ledger.resume_account("run").take() == 50
    assert b"\xff" not in path.read_bytes()


def test_a_chain_written_anew_is_noticed_by_whoever_has_seen_the_old_one(path):
    """With write access the whole chain can be rewritten; checkpoints and reports still know the old head."""
    with Ledger(path) as ledger:
        seen, facts = ledger.head(), [entry.fact for entry in ledger.entries()]
    write_anew(path, [fact | ({"units": 1} if "account" in fact and "owner" not in fact else {}) for fact in facts])
    with pytest.raises(LedgerRolledBack, match="its witness file has seen"):
        Ledger(path)
    path.with_name("data.hush-head").unlink()
    Ledger(path).close()  # nothing beside the file knows better
    with pytest.raises(LedgerRolledBack, match="a checkpoint or report has seen"):
        Ledger(path, seen=seen)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kind": "gifted"}, "unknown kind 'gifted'"),
        ({"kind": "settled", "units": -1}, "settled -1 units"),
        ({"kind": "settled", "units": 51}, "settled 51 units"),
        ({"kind": "reserved", "units": 49}, "reserved 49 units"),
        ({"kind": "reserved", "units": 101}, "reserved 101 units"),
        ({"kind": "reserved", "units": 60.0}, "reserved 60.0 units"),
        ({"kind": "reserved", "units": True}, "reserved True units"),
        ({"kind": "reserved", "account": "walk"}, "KeyError"),
        ({"kind": "resumed", "owner": "me"}, "an owner that is no token"),
        ({"kind": "created"}, "not what entry 5 can be"),
        ({"kind": "linked", "data": "x"}, "data is no hash"),
    ],
)
def test_an_entry_that_makes_no_sense_is_refused_though_its_hash_is_right(path, wrong, words):
    with Ledger(path) as ledger:
        facts = [entry.fact for entry in ledger.entries()]
    write_anew(path, [*facts, {"account": "run", "units": 60, "at": "2026-01-01T00:00:00"} | wrong])
    with pytest.raises(LedgerDamaged, match=f"entry 5 to make sense; came .*{words}"):
        Ledger(path)


@pytest.mark.parametrize("kind", ["settled", "closed"])
def test_nobody_frees_units_that_an_earlier_owner_may_have_used(path, kind):
    with Ledger(path) as ledger:
        facts = [entry.fact for entry in ledger.entries()]
    step = {"account": "run", "at": "2026-01-01T00:00:00"}
    write_anew(path, [*facts, step | {"kind": "resumed", "owner": "0" * 32}, step | {"kind": kind, "units": 49}])
    with pytest.raises(LedgerDamaged, match=f"{kind} 49 units of account 'run', which can be 50 to 50"):
        Ledger(path)


@pytest.mark.parametrize("key", ["units", "account", "distance", "upfront", "costs", "at", "data", "owner", "budget"])
def test_a_forged_opening_is_refused(path, key):
    """S5, S10: counts are whole and not negative, names can be shown, whatever the hashes say."""
    event = {"kind": "Gaussian", "noise_multiplier": 100.0}
    wrong = {
        "units": [[event, -3]],
        "account": "a\x1b[8m",
        "distance": -0.5,
        "upfront": {"kind": "Nothing at all"},
        "costs": [[-1.0]],
        "at": "\x1b[8m",
        "data": "\x1b[8m",
        "owner": "",
        "budget": {"epsilon": -1.0, "delta": 1e-5},
    }
    with Ledger(path) as ledger:
        facts = [entry.fact for entry in ledger.entries()]
    write_anew(path, [facts[0], facts[1] | {key: wrong[key]}])
    with pytest.raises(LedgerDamaged, match="entry 2 to make sense") as refusal:
        Ledger(path)
    assert str(refusal.value).isprintable()


def test_an_older_copy_is_refused(path, tmp_path):
    shutil.copy(path, tmp_path / "backup")
    with Ledger(path) as ledger:
        account = ledger.resume_account("run")
        account.spend_up_to(80)
        seen = account.head()
    shutil.copy(tmp_path / "backup", path)
    with pytest.raises(LedgerRolledBack, match="put back the newest copy"):
        Ledger(path)
    with pytest.raises(LedgerRolledBack), Ledger(tmp_path / "backup") as other:
        other.resume_account("run", seen=seen)
    with pytest.raises(LedgerRolledBack):
        Ledger(tmp_path / "backup", seen=seen)


def test_another_ledger_in_its_place_is_refused(path, tmp_path):
    Ledger(tmp_path / "other.hush", create=True).close()
    os.replace(tmp_path / "other.hush", path)
    with pytest.raises(LedgerRolledBack, match="came another ledger; put the right one back"):
        Ledger(path)


def test_a_removed_ledger_is_not_begun_anew_unnoticed(path):
    path.unlink()
    with pytest.raises(LedgerRolledBack, match="what was spent is then forgotten"):
        Ledger(path, budget=CAP)
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0", b"not a ledger", bytes(8192), b"hush-ledger 2\n"])
def test_what_is_no_ledger_is_refused_and_left_alone(tmp_path, content):
    (tmp_path / "l").write_bytes(content)
    for asked in ({}, {"budget": CAP}, {"create": True}):
        with pytest.raises(LedgerDamaged, match="to be a hush ledger"):
            Ledger(tmp_path / "l", **asked)
    assert (tmp_path / "l").read_bytes() == content and len(list(tmp_path.iterdir())) == 1


def test_s8_another_database_is_refused_and_left_alone(tmp_path):
    connection = sqlite3.connect(tmp_path / "other.db")
    connection.execute("CREATE TABLE patients (name)")
    connection.commit()
    connection.close()
    before = (tmp_path / "other.db").read_bytes()
    with pytest.raises(LedgerDamaged, match="to be a hush ledger; came something else"):
        Ledger(tmp_path / "other.db")
    assert (tmp_path / "other.db").read_bytes() == before, "not even its journal mode"
    assert [path.name for path in tmp_path.iterdir()] == ["other.db"]


def test_a_place_where_no_ledger_can_be_is_said(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for where in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(LedgerDamaged, match="something that is no file"):
            Ledger(where)
    with pytest.raises(LedgerUnwritable, match="No such file or directory"):
        Ledger(tmp_path / "nowhere" / "l", create=True)
    with pytest.raises(LedgerMissing, match="put it back"):  # a run that resumes never makes a new ledger
        Ledger(tmp_path / "l", create=True, seen=Head(3, "0" * 64))
    for impossible in ("nul\0", "x" * 300):
        with pytest.raises(LedgerUnwritable):
            Ledger(tmp_path / impossible, create=True)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_another_process_truncating_the_file_under_us_is_noticed(path):
    with Ledger(path) as ledger:
        account = ledger.resume_account("run")
        account.spend_up_to(70)
        whole = path.read_bytes()
        os.truncate(path, len(whole) - 30)
        with pytest.raises(LedgerDamaged):
            account.spend_up_to(100)
        path.write_bytes(whole)
        account.spend_up_to(100)


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
    path.write_bytes(path.read_bytes()[:500])
    assert "Traceback" not in hush("show", str(path))[2]


def test_a_ledger_never_has_the_name_of_a_witness(path):
    with pytest.raises(LedgerMissing, match="does not end in -head"):
        Ledger(f"{path}-head-head", create=True)
    assert not os.path.exists(f"{path}-head-head")


def test_lines_are_found_wherever_the_pieces_end(path, monkeypatch):
    content = path.read_bytes() + b"\n\nlonger than a piece" * 5
    path.write_bytes(content)
    monkeypatch.setattr(file_format, "_PIECE", 7)
    with open(path, "rb") as file:
        found = list(file_format.lines(file.fileno(), 3, len(content)))
    *whole, rest = content[3:].split(b"\n")
    assert found == [*((line, True) for line in whole), (rest, False)]


@pytest.mark.timing
def test_what_is_long_and_no_entry_is_read_in_time_of_its_length(path):
    def seconds(mebibytes: int) -> float:
        with open(path, "ab") as file:
            file.truncate(end)
            file.truncate(end + (mebibytes << 20))  # zeros, as a power cut may leave them
        best = float("inf")
        for _ in range(7):
            began = time.process_time()
            Ledger(path).close()
            best = min(best, time.process_time() - began)
        return best

    end = path.stat().st_size
    assert seconds(56) < 8 * seconds(14), "in linear time 4 times as long, in quadratic time 16 times"
