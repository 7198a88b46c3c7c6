"""Where bytes lie: files that safetensors reads, whoever writes which part of them."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from safetensors import safe_open

from parallax import CheckpointError
from parallax.checkpoint import pieces
from parallax.checkpoint.layout import DTYPES, Spec, layout
from parallax.checkpoint.pieces import check, checksum, chunks, copy_, runs, write
from parallax.checkpoint.plain import back, plain
from parallax.core.slices import Box

SHAPES = array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7)


@st.composite
def cut(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that make it up: cut in two along some dims."""
    shape = draw(SHAPES)
    boxes = [Box((0,) * len(shape), shape)]
    for dim, size in enumerate(shape):
        if draw(st.booleans()):
            at = draw(st.integers(0, size))
            boxes = [
                Box(
                    tuple(first if d == dim else o for d, o in enumerate(b.offsets)),
                    tuple(length if d == dim else n for d, n in enumerate(b.lengths)),
                )
                for b in boxes
                for first, length in ((0, at), (at, size - at))
            ]
    return shape, boxes


def filled(spec: Spec) -> torch.Tensor:
    numbers = torch.arange(torch.Size(spec.shape).numel()) % 100
    return numbers.to(getattr(torch, spec.dtype)).view(spec.shape)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    tensors=st.lists(st.tuples(cut(), st.sampled_from(sorted(DTYPES))), min_size=1, max_size=4),
    limit=st.sampled_from([1, 100, 1 << 30]),
    chunk=st.sampled_from([1, 16, 1 << 22]),
    order=st.randoms(use_true_random=False),
)
def test_parts_written_in_any_order_are_what_safetensors_reads(
    tensors: Any, limit: int, chunk: int, order: Any, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("files")
    rows = {f"params/{i}": (Spec(d, shape), boxes) for i, ((shape, boxes), d) in enumerate(tensors)}
    found = layout({key: spec for key, (spec, _) in rows.items()}, limit, "token")
    for file in found.files:
        with (folder / file.name).open("wb") as out:
            out.write(file.header)
            out.truncate(file.size)
    parts = [(key, box) for key, (_, boxes) in rows.items() for box in boxes]
    order.shuffle(parts)
    real, pieces.CHUNK = pieces.CHUNK, chunk
    try:
        sums = {}
        for key, box in parts:
            spec, place = rows[key][0], found.places[key]
            file = os.open(folder / place.file, os.O_WRONLY)
            part = filled(spec)[box.window] if spec.shape else filled(spec)
            sums[key, box] = tuple(write(file, place.start, spec, box, part))
            os.close(file)
        for key, (spec, boxes) in rows.items():
            with safe_open(folder / found.places[key].file, framework="pt") as handle:
                whole = handle.get_tensor(key.removeprefix("params/"))
                assert handle.metadata()["token"] == "token"
            bits = whole.reshape(-1).view(torch.uint8)
            assert torch.equal(bits, filled(spec).reshape(-1).view(torch.uint8))
            assert all(check(whole, box, sums[key, box], box) for box in boxes)
            wanted = order.choice(boxes)
            target = torch.empty(wanted.lengths, dtype=whole.dtype)
            copy_(target, whole, wanted)
            expected = filled(spec)[wanted.window] if spec.shape else filled(spec)
            assert torch.equal(
                target.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
            )
    finally:
        pieces.CHUNK = real


@given(cut(), st.sampled_from([1, 2, 8]))
def test_stretches_cover_a_box_once(found: Any, itemsize: int) -> None:
    shape, boxes = found
    covered: list[int] = []
    for box in boxes:
        covered += [o + i for o, n in runs(box, shape, itemsize) for i in range(n)]
    assert sorted(covered) == list(range(torch.Size(shape).numel() * itemsize))


def test_a_changed_byte_has_another_checksum() -> None:
    one = torch.zeros(1000)
    other = one.clone()
    other[500] = 1e-45
    assert checksum(one) != checksum(other)
    box = Box((0,), (1000,))
    assert check(one, box, (checksum(one),), box)
    assert not check(other, box, (checksum(one),), box)
    assert not check(one, box, (), box)


def test_only_chunks_that_are_read_are_checked() -> None:
    """A part far away may be damaged: what is read is right, and that is what was asked."""
    rows = 3 * (pieces.CHUNK >> 12)
    whole, piece = torch.ones(rows, 1024), Box((0, 0), (rows, 1024))
    sums = tuple(checksum(whole[c.window].contiguous()) for c in chunks(piece, 4))
    assert len(sums) == 3
    whole[-1, -1] = 2
    assert check(whole, piece, sums, Box((0, 0), (rows // 3, 1024)))
    assert not check(whole, piece, sums, Box((rows - 1, 0), (1, 10)))


def test_a_dtype_that_no_file_holds_is_named() -> None:
    with pytest.raises(CheckpointError) as error:
        layout({"params/w": Spec("complex128", (2,))}, 10, "")
    assert str(error.value).startswith(
        "params/w has the dtype complex128, which safetensors files do not hold.\n\nConvert it to "
        "one of float64, float32, "
    )


def test_files_hold_at_most_what_they_may(tmp_path: Path) -> None:
    specs = {f"params/{i}": Spec("float32", (10,)) for i in range(5)}
    found = layout({**specs, "step": Spec("int64", ())}, 80, "", prefix="x")
    assert [file.name for file in found.files] == [
        "model.x-00001-of-00003.safetensors",
        "model.x-00002-of-00003.safetensors",
        "model.x-00003-of-00003.safetensors",
        "state.safetensors",
    ]
    assert all(file.size - len(file.header) <= 80 for file in found.files)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
        | st.lists(inner, max_size=3).map(deque)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_plain_state_comes_back_as_it_was(value: Any) -> None:
    import json

    again = back(json.loads(json.dumps(plain(value, "it"))))
    assert again == value
    assert type(again) is type(value)


def test_tensors_counters_and_sets_come_back() -> None:
    tensors: list[torch.Tensor] = []
    value = {"a": [torch.ones(2), Counter({1: 2})], "b": {3, 1}, "c": OrderedDict(x=(1,))}
    value["d"] = deque([1, 2], maxlen=2)
    again = back(plain(value, "it", tensors), tensors)
    assert torch.equal(again["a"][0], torch.ones(2))
    assert (again["a"][1], again["b"], again["c"]) == (Counter({1: 2}), {1, 3}, {"x": (1,)})
    assert type(again["a"][1]) is Counter
    assert (again["d"], again["d"].maxlen) == (deque([1, 2]), 2)


@pytest.mark.parametrize("value", [{"a": 1, "b": 2}, {"exec": [1]}, {"tensor": 5}])
def test_what_plain_does_not_make_is_refused(value: Any) -> None:
    with pytest.raises((ValueError, IndexError)):
        back(value)
