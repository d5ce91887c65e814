"""States in pieces: what is not whole, not of one save or not of this model is refused with every difference."""

from __future__ import annotations

import errno
import json
import math

import pytest
import torch
from safetensors import SafetensorError

from turnout.core.errors import ModelError
from turnout.train import checkpoint
from turnout.train.checkpoint import KINDS, Counters, read_state, save_state
from turnout.train.pieces import Piece
from turnout.train.rank_wire import error_of, fault_row
from turnout.train.sharded_parameters import place

SHAPES = {"a.weight": (7, 4), "b.weight": (6, 6), "norm": (5,)}
COUNTERS = Counters(3, 5)
SPLIT = {"a.weight": 1, "b.weight": 0, "norm": None}


def whole(kind):
    return {
        name: 1000 * KINDS.index(kind) + torch.arange(math.prod(s), dtype=torch.float32).view(s)
        for name, s in SHAPES.items()
    }


def pieces(data, tensor, filled):
    """A rank's parts, (rank, ranks) each: of the tensors above, or of NaN."""
    out = []
    for name, shape in SHAPES.items():
        start, size = place(shape, SPLIT[name], data, tensor)
        cut = tuple(slice(at, at + n) for at, n in zip(start, size))
        parts = {kind: whole(kind)[name][cut].clone() for kind in KINDS}
        if not filled:
            parts = {kind: torch.full_like(part, torch.nan) for kind, part in parts.items()}
        out.append(Piece(name, shape, start, size, parts, SPLIT[name] is not None or tensor[0] == 0))
    return out


def save(folder, data, tensor, counters=COUNTERS):
    folder.mkdir(exist_ok=True)
    for d in range(data):
        for t in range(tensor):
            rank = d * tensor + t
            save_state(folder, pieces((d, data), (t, tensor), True), counters, rank, data * tensor)


@pytest.mark.parametrize("writers", [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (8, 2)], ids=str)
@pytest.mark.parametrize("readers", [(1, 1), (3, 1), (2, 2)], ids=str)
def test_any_ranks_read_what_any_ranks_wrote(tmp_path, writers, readers):
    save(tmp_path, *writers)
    saved = read_state(tmp_path, SHAPES)
    assert saved.counters == COUNTERS
    for d in range(readers[0]):
        for t in range(readers[1]):
            mine = pieces((d, readers[0]), (t, readers[1]), False)
            saved.copy_into(mine)
            for found, expected in zip(mine, pieces((d, readers[0]), (t, readers[1]), True)):
                assert all(torch.equal(found.tensors[kind], expected.tensors[kind]) for kind in KINDS)


@pytest.mark.parametrize(
    ("text", "number"), [("No space left on device (os error 28)", errno.ENOSPC), ("torn", errno.EIO)]
)
def test_what_cannot_be_written_is_an_error_of_the_system_from_a_rank_too(
    tmp_path, monkeypatch, text, number
):
    def full(*_, **__):
        raise SafetensorError(f"Error while serializing: I/O error: {text}")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match=text[:5]) as raised:
        save(tmp_path, 1, 1)
    for fault in (raised.value, error_of(fault_row(raised.value))):
        assert isinstance(fault, OSError) and fault.errno == number
        assert text in str(fault) and "master-00000-of-00001.safetensors" in str(fault)


def test_parts_of_all_ranks_cover_every_element_once():
    for name, shape in SHAPES.items():
        for data, tensor in ((1, 1), (2, 1), (4, 2), (9, 1)):
            count = torch.zeros(shape)
            for d in range(data):
                for t in range(tensor):
                    for piece in pieces((d, data), (t, tensor), True):
                        if piece.name == name and piece.kept:
                            assert piece.fits()
                            count[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape))] += 1
            assert torch.equal(count, torch.ones(shape))


def refusal(folder, shapes=SHAPES):
    with pytest.raises(ModelError) as caught:
        read_state(folder, shapes)
    return str(caught.value)


def test_a_file_that_is_missing_is_named(tmp_path):
    save(tmp_path, 2, 1)
    (tmp_path / "exp_avg-00001-of-00002.safetensors").unlink()
    assert "exp_avg-00001-of-00002.safetensors: cannot be read" in refusal(tmp_path)
    (tmp_path / "trainer.json").unlink()
    assert "trainer.json: cannot be read" in refusal(tmp_path)


def test_a_file_of_another_save_is_named(tmp_path):
    save(tmp_path / "a", 2, 1)
    save(tmp_path / "b", 2, 1, Counters(9, 9))
    name = "master-00000-of-00002.safetensors"
    (tmp_path / "b" / name).replace(tmp_path / "a" / name)
    assert f"{name} = 9 steps: is of another save" in refusal(tmp_path / "a")


def test_a_file_in_the_place_of_anothers_leaves_elements_out(tmp_path):
    save(tmp_path, 2, 1)
    one, two = (tmp_path / f"master-0000{rank}-of-00002.safetensors" for rank in (0, 1))
    two.write_bytes(one.read_bytes())
    found = refusal(tmp_path)
    for name in SHAPES:
        assert f"master: {name}" in found
    assert "the pieces do not make up its" in found


def test_another_model_is_told_name_by_name(tmp_path):
    save(tmp_path, 2, 2)
    found = refusal(tmp_path, {"a.weight": (7, 4), "b.weight": (6, 5), "c": (1,)})
    assert "master: b.weight = (6, 6): the model has shape (6, 5)" in found
    assert "exp_avg_sq: c: the model has shape (1,)" in found
    assert "norm = (5,): the model has shape None" in found and "a.weight" not in found


def test_a_file_of_another_format_or_torn_is_refused(tmp_path):
    save(tmp_path, 1, 1)
    path = tmp_path / "master-00000-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert "master-00000-of-00001.safetensors: cannot be read" in refusal(tmp_path)
    row = json.loads((tmp_path / "trainer.json").read_text())
    (tmp_path / "trainer.json").write_text(json.dumps(row | {"format": 1}))
    assert "trainer.json: is not of format 2" in refusal(tmp_path)
