import math
import re
import sysconfig
from pathlib import Path

import pytest
import torch

from parallax.errors import DataError
from parallax.train.text import Windows, corpus, decode, encode, unigram_entropy


def folder(root: Path, files: int = 60) -> Path:
    for i in range(files):
        path = root / f"part{i % 3}" / f"file{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of file {i}\n" * 5)
    return root


def held_out_names(root: Path) -> set[str]:
    text = decode(corpus(root).held_out)
    return set(re.findall(r"file \d+", text))


def message(error: pytest.ExceptionInfo[DataError]) -> str:
    return str(error.value)


def test_a_folder_is_split_by_whole_files(tmp_path):
    text = corpus(folder(tmp_path))
    train, held_out = (
        set(re.findall(r"file \d+", decode(part))) for part in (text.train, text.held_out)
    )
    assert text.files == 60
    assert len(train | held_out) == 60
    assert not train & held_out
    assert 1 <= len(held_out) <= 12


def test_a_file_stays_in_its_part_when_others_come(tmp_path):
    before = held_out_names(folder(tmp_path, 60))
    after = held_out_names(folder(tmp_path, 90))
    assert before <= after


def test_the_same_files_elsewhere_give_the_same_bytes(tmp_path):
    one, two = corpus(folder(tmp_path / "a")), corpus(folder(tmp_path / "b"))
    assert torch.equal(one.train, two.train)
    assert torch.equal(one.held_out, two.held_out)


def test_a_limit_cuts_the_bytes_and_keeps_both_parts(tmp_path):
    text = corpus(folder(tmp_path, 400), limit=20_000)
    # Whole files are joined by line breaks, which the limit does not count.
    assert 20_000 <= len(text.train) + len(text.held_out) <= 20_000 + text.files
    assert len(text.held_out) > 0


def test_the_end_of_a_single_file_is_held_out(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(1, 101)))
    text = corpus(path)
    assert text.train.tolist() == list(range(1, 96))
    assert text.held_out.tolist() == list(range(96, 101))


def test_bytes_that_are_not_utf8_are_replaced(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(b"a" * 100 + b"\xff" + b"b" * 10)
    text = corpus(path)
    assert decode(torch.cat((text.train, text.held_out))) == "a" * 100 + "\ufffd" + "b" * 10


def test_hidden_empty_and_binary_files_do_not_count(tmp_path):
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.bin").write_bytes(b"a\0b")
    (tmp_path / "text.txt").write_text("text " * 20)
    assert corpus(tmp_path).files == 1


def test_the_standard_library_is_read_without_its_tests():
    text = corpus()
    assert text.files > 200
    assert text.train.dtype == torch.uint8
    read = text.train.numpy().tobytes() + text.held_out.numpy().tobytes()
    library = Path(sysconfig.get_path("stdlib"))
    assert (library / "textwrap.py").read_bytes() in read
    skipped = library / "idlelib" / "config.py"
    assert not skipped.exists() or skipped.read_bytes() not in read


def test_a_missing_path_is_named(tmp_path):
    path = tmp_path / "nowhere"
    with pytest.raises(DataError) as error:
        corpus(path)
    assert message(error) == (
        f"Text was asked for from {path}; there is no file or folder {str(path)!r}.\n\n"
        "Give --data a path that exists."
    )


def test_a_folder_without_text_is_named(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError) as error:
        corpus(tmp_path)
    assert message(error) == (
        f"Text was asked for from {tmp_path}; there are 1 files there and none holds text (empty "
        "files and files with a zero byte do not count).\n\n"
        "Give --data a text file, or a folder that has some."
    )


def test_windows_predict_every_byte_once():
    text = torch.randint(256, (101,), dtype=torch.uint8)
    windows = Windows(text, seq=10)
    assert len(windows) == 10
    assert windows[0].dtype == torch.int64
    targets = torch.cat([windows[i][1:] for i in range(len(windows))])
    assert targets.tolist() == text[1:].tolist()
    with pytest.raises(IndexError):
        windows[10]


def test_a_text_shorter_than_one_window_is_an_error():
    with pytest.raises(DataError) as error:
        Windows(torch.zeros(8, dtype=torch.uint8), seq=8, name="held-out text")
    assert message(error) == (
        "Windows of 8 bytes were asked for; the held-out text has 8 bytes, and one window takes "
        "9.\n\nGive more text, or a --seq of at most 7."
    )


def test_entropy_of_known_frequencies():
    assert unigram_entropy(torch.arange(256, dtype=torch.uint8)) == pytest.approx(math.log(256))
    assert unigram_entropy(torch.full((9,), 7, dtype=torch.uint8)) == 0
    quarter = torch.tensor([1, 1, 1, 2], dtype=torch.uint8)
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert unigram_entropy(quarter) == pytest.approx(expected)


def test_text_survives_the_tokens():
    assert decode(encode("naïve → text\n")) == "naïve → text\n"
