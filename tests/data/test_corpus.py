from __future__ import annotations

import os

import pytest

from hybrid_strategy.data.corpus import find_corpus
from hybrid_strategy.errors import DataError


def write(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.txt").write_bytes(text.encode() if isinstance(text, str) else text)
    return str(folder / "*.txt")


def test_the_standard_library_is_there_in_a_fixed_order():
    corpus = find_corpus()
    names = [name for _, name in corpus.files]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or "__pycache__" in name]
    assert corpus.size_bytes > 5_000_000


def test_documents_are_the_files_and_bytes_that_are_no_text_are_replaced(tmp_path):
    corpus = find_corpus([write(tmp_path, a="first\n", b=b"caf\xe9 \xff", c="", d="ünïcode")])
    documents = list(corpus.documents())
    assert [(each.text, each.ends) for each in documents] == [("first\n", True), ("caf� �", True), ("ünïcode", True)]
    assert sum(each.size_bytes for each in documents) == corpus.size_bytes


@pytest.mark.parametrize("line", ["word " * 30 + "\n", "ü" * 10_001])
def test_large_files_are_read_in_pieces_that_join_to_the_whole(tmp_path, line):
    text = line * 40
    corpus = find_corpus([write(tmp_path, a=text, b="short\n")])
    documents = list(corpus.documents())
    assert "".join(each.text for each in documents) == text + "short\n"
    assert [each.ends for each in documents] == [False] * (len(documents) - 2) + [True, True]
    assert len(documents) > 2
    if line.endswith("\n"):
        assert all(each.text.endswith("\n") for each in documents)


def test_globs_are_joined_and_each_file_counts_once(tmp_path):
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "deep" / "deeper" / "x.md").write_text("x")
    pattern = write(tmp_path, b="b", a="a")
    corpus = find_corpus([pattern, str(tmp_path / "a.txt"), str(tmp_path / "**" / "*.md")])
    assert [name for _, name in corpus.files] == ["a.txt", "b.txt", "deep/deeper/x.md"]


def test_a_cap_takes_exactly_so_much_and_always_the_same(tmp_path):
    pattern = write(tmp_path, **{f"file{number}": "x" * 100 for number in range(20)})
    corpus = find_corpus([pattern], max_bytes=450)
    assert corpus.size_bytes == 450 == sum(len(each.text) for each in corpus.documents())
    assert len(corpus.files) == 5
    assert corpus == find_corpus([pattern], max_bytes=450)
    assert find_corpus([pattern], max_bytes=10_000).size_bytes == 2000


def test_digest_is_that_of_names_and_contents_wherever_they_are(tmp_path):
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder, text in zip(folders, ("same", "same", "other"), strict=True):
        folder.mkdir()
        write(folder, a=text)
    one, two, three = (find_corpus([str(folder / "*")]) for folder in folders)
    assert one.digest() == two.digest() != three.digest()
    assert len({each.stamp() for each in (one, two, three)}) == 3


def test_stamp_changes_when_a_file_is_written(tmp_path):
    pattern = write(tmp_path, a="text")
    before = find_corpus([pattern]).stamp()
    assert find_corpus([pattern]).stamp() == before
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    assert find_corpus([pattern]).stamp() != before


def test_refusals(tmp_path):
    with pytest.raises(DataError, match=r"data.files is .*nothing\*.*must match at least one file"):
        find_corpus([write(tmp_path, a="x"), str(tmp_path / "nothing*")])
    with pytest.raises(DataError, match="matches are no files"):
        find_corpus([str(tmp_path)])
    with pytest.raises(DataError, match="there must be text"):
        find_corpus([write(tmp_path, a="")])
