from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

import hybrid_strategy.data.prepare as prepare_module
from hybrid_strategy.data.corpus import find_corpus
from hybrid_strategy.data.prepare import TextSpec, prepare_text
from hybrid_strategy.data.token_file import open_tokens
from hybrid_strategy.data.tokenizer import load_tokenizer
from hybrid_strategy.errors import DataError
from hybrid_strategy.files import cache_folder


def write_files(folder, count=20):
    folder.mkdir(exist_ok=True)
    for number in range(count):
        lines = [f"file {number} has line {line}: the quick brown fox\n" for line in range(30)]
        (folder / f"{number:02}.txt").write_text("".join(lines))
    return (str(folder / "*.txt"),)


@pytest.fixture
def spec(tmp_path):
    return TextSpec(write_files(tmp_path / "files"), vocab_size=300, validation_fraction=0.1, cache_dir=tmp_path / "cache")


def entries(spec):
    return sorted(
        each.name for each in (cache_folder(spec.cache_dir) / "text").iterdir() if each.is_dir() and each.name != "stamps"
    )


def test_tokens_are_the_text_split_by_document(spec):
    prepared = prepare_text(spec)
    tokenizer = load_tokenizer(prepared.tokenizer)
    texts = [
        tokenizer.decode(open_tokens(path, verify=True).tokens.tolist(), skip_special_tokens=False).split("<|endoftext|>")
        for path in (prepared.train, prepared.validation)
    ]
    train, validation = ({text for text in part if text} for part in texts)
    assert train | validation == {document.text for document in find_corpus(spec.files).documents()}
    assert (len(train), len(validation)) == (18, 2)
    assert [part[-1] for part in texts] == ["", ""]
    assert prepared.train_tokens == open_tokens(prepared.train).header.count
    assert prepared.vocab_size == 300 == open_tokens(prepared.train).header.vocab_size


def test_a_second_call_does_nothing(spec, monkeypatch):
    first = prepare_text(spec)
    before = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    monkeypatch.setattr(prepare_module, "_make", None)
    monkeypatch.setattr("hybrid_strategy.data.corpus.Corpus.digest", None)  # the files are not even read
    assert prepare_text(spec) == first
    assert before == {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}


def test_files_that_were_only_touched_are_found_by_their_content(spec, monkeypatch, tmp_path):
    first = prepare_text(spec)
    os.utime(tmp_path / "files" / "00.txt", ns=(1, 1))
    monkeypatch.setattr(prepare_module, "_make", None)
    assert prepare_text(spec) == first


def test_a_changed_file_or_setting_makes_another_entry(spec, tmp_path):
    from dataclasses import replace

    folders = {prepare_text(spec).folder}
    for change in ({"vocab_size": 301}, {"validation_fraction": 0.2}, {"max_bytes": 9000}):
        folders.add(prepare_text(replace(spec, **change)).folder)
    (tmp_path / "files" / "00.txt").write_text("other text\n")
    folders.add(prepare_text(spec).folder)
    assert len(folders) == 5 == len(entries(spec))


def test_the_same_text_makes_the_same_files_anywhere(spec, tmp_path):
    other = TextSpec(write_files(tmp_path / "elsewhere"), 300, 0.1, cache_dir=tmp_path / "second")
    one, two = prepare_text(spec), prepare_text(other)
    assert one.folder.name == two.folder.name
    for name in ("train.bin", "validation.bin", "tokenizer.json"):
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes()


PROGRAM = """
import sys, time
import hybrid_strategy.data.prepare as prepare
make = prepare._make
def counted(*arguments):
    print("made", flush=True)
    time.sleep(float(sys.argv[3]))
    make(*arguments)
prepare._make = counted
spec = prepare.TextSpec((sys.argv[1],), vocab_size=300, validation_fraction=0.1, cache_dir=sys.argv[2])
print(prepare.prepare_text(spec).folder, flush=True)
"""


def start(spec, delay):
    command = [sys.executable, "-c", PROGRAM, spec.files[0], str(spec.cache_dir), str(delay)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_of_two_processes_at_once_one_does_the_work(spec):
    processes = [start(spec, 1.0) for _ in range(2)]
    answers = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(map(len, answers)) == [1, 2]
    assert answers[0][-1] == answers[1][-1]


def test_a_killed_process_leaves_nothing_that_looks_complete(spec):
    process = start(spec, 60)
    assert process.stdout.readline() == "made\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    begun = time.monotonic()
    assert prepare_text(spec).train_tokens > 0
    assert time.monotonic() - begun < 30
    assert len(entries(spec)) == 1


def test_left_overs_of_a_killed_process_are_removed(spec):
    folder = prepare_text(spec).folder
    left_over = folder.with_name(f".{folder.name}.{prepare_module.socket.gethostname()}.99999999")
    left_over.mkdir()
    (folder / "prepared.json").unlink()
    assert prepare_text(spec).folder == folder
    assert (folder / "prepared.json").is_file()
    assert not left_over.exists()


def test_a_failure_leaves_no_entry(spec, monkeypatch):
    def fail(*_):
        raise RuntimeError("full disk")

    monkeypatch.setattr(prepare_module, "encode", fail)
    with pytest.raises(RuntimeError, match="full disk"):
        prepare_text(spec)
    assert entries(spec) == []


def test_a_damaged_entry_is_named(spec):
    prepared = prepare_text(spec)
    prepared.validation.write_bytes(b"")
    with pytest.raises(DataError, match=r"validation\.bin"):
        prepare_text(spec)


def test_progress_is_told(spec):
    told = []
    prepare_text(spec, lambda *report: told.append(report))
    size = find_corpus(spec.files).size_bytes
    assert {phase for phase, _, _ in told} == {"tokenizer", "tokens"}
    assert {total for _, _, total in told} == {size}
    assert told[-1] == ("tokens", size, size)


def test_one_large_file_is_split_too(tmp_path):
    (tmp_path / "all.txt").write_text("a line of some length\n" * 2000)
    spec = TextSpec((str(tmp_path / "all.txt"),), vocab_size=270, cache_dir=tmp_path / "cache")
    prepared = prepare_text(spec)
    assert prepared.validation_tokens > 0
    assert prepared.train_tokens > prepared.validation_tokens


def test_the_tokenizer_of_a_large_text_is_trained_on_a_part(spec, monkeypatch):
    monkeypatch.setattr(prepare_module, "TRAINING_BYTES", find_corpus(spec.files).size_bytes // 4)
    told = []
    prepare_text(spec, lambda *report: told.append(report))
    assert sum(phase == "tokenizer" for phase, _, _ in told) == 5


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("HYBRID_STRATEGY_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "hybrid_strategy"
    monkeypatch.setenv("HYBRID_STRATEGY_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    assert cache_folder("~/there") == tmp_path / "there"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 3}, "vocab_size is 3"),
        ({"validation_fraction": 0.0}, "validation_fraction is 0.0"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
        ({"max_bytes": 0}, "max_bytes is 0"),
        ({"max_bytes": 10}, "there must be a document to train on and another for validation. A document is"),
        ({"files": ("nothing-here-*",)}, "must match at least one file"),
    ],
)
def test_refusals(spec, change, words):
    from dataclasses import replace

    with pytest.raises(DataError, match=words):
        prepare_text(replace(spec, **change))
