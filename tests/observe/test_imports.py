from __future__ import annotations

import base64
import math
import random
import struct
from pathlib import Path

import pytest

from mpbackend.device import Device
from mpbackend.errors import DocumentError
from mpbackend.observe.event_files import masked_crc, read_scalars
from mpbackend.observe.imports import import_run, read_log
from mpbackend.observe.record import RecipeName, load_record

WRITTEN_BY_TENSORBOARD = base64.b64decode(
    "SAAAAAAAAAD+kkidCflJMQVLw9pBGg1icmFpbi5FdmVudDoyUi4KLHRlbnNvcmJvYXJkLnN1bW1hcnkud3JpdGVyLmV2ZW50X2ZpbGVfd3JpdGVy6xtq2iAAAAAAAAAAKe2pUAkAAAAAAEiPQBAB"
    "KhMKEQoKdHJhaW4vbG9zcxUAAEBAnHSDXyoAAAAAAAAAro2R9QkAAAAAAEiPQBABKh0KGwoPdHJhaW4vZ3JhZF9ub3JtQggIASoEAAAAP6ZahRkgAAAAAAAAACntqVAJAAAAAABQj0AQAioTChEK"
    "CnRyYWluL2xvc3MVAADAP1CFsqoqAAAAAAAAAK6NkfUJAAAAAABQj0AQAiodChsKD3RyYWluL2dyYWRfbm9ybUIICAEqBAAAgD9KMlEaIAAAAAAAAAAp7alQCQAAAAAAWI9AEAMqEwoRCgp0cmFp"
    "bi9sb3NzFQAAgD8k+N6WKgAAAAAAAACujZH1CQAAAAAAWI9AEAMqHQobCg90cmFpbi9ncmFkX25vcm1CCAgBKgQAAMA/29/1rh4AAAAAAAAA2dwSMhADKhoKGAoIZXZhbC9wcGxCDAgCMgiamZmZ"
    "mZm5P3mnK6ccAAAAAAAAAMjBlR0QBCoYChYKCnRyYWluL2xvc3NCCAgBIgQAAMB/ZnumCQ=="
)
"""Written by ``EventFileWriter`` of TensorBoard 2.21.0: a plain value, a float tensor in ``float_val``, a double one, and NaN in ``tensor_content``."""

NAME = "events.out.tfevents.1.host"
DEVICE = Device(key="unknown", arch="unknown", name="unknown")
RECIPE = RecipeName(text="bf16", hash="0", granted="unknown")


def frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def event_file(folder: Path, content: bytes = WRITTEN_BY_TENSORBOARD) -> Path:
    path = folder / NAME
    path.write_bytes(content)
    return path


def table(folder: Path, text: str) -> Path:
    path = folder / "log.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_crc_is_that_of_the_standard() -> None:
    # RFC 3720, B.4: CRC-32C of 32 bytes of zeros is 0x8a9136aa; the mask as record_writer.h defines it.
    crc = 0x8A9136AA
    assert masked_crc(bytes(32)) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_what_tensorboard_wrote_is_read(tmp_path: Path) -> None:
    scalars = list(read_scalars(event_file(tmp_path)))
    assert [(step, tag) for step, tag, _ in scalars][:3] == [(1, "train/loss"), (1, "train/grad_norm"), (2, "train/loss")]
    assert [value for _, tag, value in scalars if tag == "train/grad_norm"] == [0.5, 1.0, 1.5]
    assert [value for _, tag, value in scalars if tag == "eval/ppl"] == [0.1]
    losses = [value for _, tag, value in scalars if tag == "train/loss"]
    assert losses[:3] == [3.0, 1.5, 1.0]
    assert math.isnan(losses[3])


def test_an_imported_run_is_a_record_that_claims_nothing_else(tmp_path: Path) -> None:
    import_run(event_file(tmp_path), tmp_path / "run", RECIPE, DEVICE, seed=7)
    record, steps = (recorded := load_record(tmp_path / "run")).record, recorded.steps
    assert [row.step for row in steps] == [1, 2, 3, 4]
    assert (steps[0].loss, steps[0].grad_norm, steps[2].metrics) == (3.0, 0.5, {"eval/ppl": 0.1})
    assert (steps[3].loss, steps[3].nonfinite) == ("nan", True)
    assert (record.run.seed, record.totals.steps, record.totals.nonfinite) == (7, 4, 1)
    assert (record.plan, record.switches, record.classes, record.memory, record.fingerprints) == ((), {}, {}, {}, {})
    assert (
        record.notes[0] == f"imported from {NAME}: recipe, device, kind and seed are as stated by whoever imported it, nothing of the arithmetic was observed"
    )
    assert record.notes[1] == "the log has no ms"


def test_a_folder_of_event_files_is_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "tb"
    folder.mkdir()
    event_file(folder)
    (folder / "events.out.tfevents.2.host").write_bytes(WRITTEN_BY_TENSORBOARD)
    assert len(read_log(folder, {})) == 4
    with pytest.raises(DocumentError, match=r"no file named \*tfevents\*"):
        read_log(tmp_path, {})


def test_an_event_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    whole = len(list(read_scalars(event_file(tmp_path))))
    for cut in range(1, 44):
        assert len(list(read_scalars(event_file(tmp_path, WRITTEN_BY_TENSORBOARD[:-cut])))) == whole - 1


def test_every_flipped_byte_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    good = list(read_scalars(event_file(tmp_path)))[:-1]
    for place in range(len(WRITTEN_BY_TENSORBOARD)):
        flipped = bytearray(WRITTEN_BY_TENSORBOARD)
        flipped[place] ^= 0x55
        try:
            found = list(read_scalars(event_file(tmp_path, bytes(flipped))))
        except DocumentError as error:
            assert "is no event file of TensorBoard" in str(error)
        else:
            # An event whose fields no longer name a scalar is left out; what is read is what was written.
            assert [item for item in found if item not in good and not math.isnan(item.value)] == [], place


def test_hostile_files_are_one_error_soon(tmp_path: Path) -> None:
    seed = 11
    print(f"seed {seed}")
    source = random.Random(seed)
    first = frame(b"\x1a\x0dbrain.Event:2")
    deep = b""
    for _ in range(2000):
        deep = b"\x2a" + bytes([0x80 | len(deep) & 0x7F, len(deep) >> 7]) + deep if len(deep) < 16000 else deep
    contents = [b"", b"\0" * 100, first[:5], first + frame(deep), first + frame(b"\x2a\xff\xff\xff\xff\x0f"), first + frame(b"\xff" * 40), frame(b"\x0b")]
    contents += [first + frame(source.randbytes(source.randrange(200))) for _ in range(300)]
    contents += [source.randbytes(source.randrange(300)) for _ in range(100)]
    outcomes = set()
    for content in contents:
        try:
            read_log(event_file(tmp_path, content), {})
            outcomes.add("read")
        except DocumentError as error:
            outcomes.add("refused")
            assert len(str(error)) < 400
    assert "refused" in outcomes


def test_a_table_is_read_by_its_heading(tmp_path: Path) -> None:
    text = "\ufeffIteration,lm loss,Grad-Norm,loss scale,learning_rate,eval acc,tokens\n2,nan,1.5,65536,1e-3,,100\n1,3.5,inf,65536,1e-3,0.25,100\n"
    steps = read_log(table(tmp_path, text), {})
    assert [(row.step, row.loss, row.grad_norm, row.scale, row.lr, row.tokens) for row in steps] == [
        (1, 3.5, "inf", 65536.0, 1e-3, 100),
        (2, "nan", 1.5, 65536.0, 1e-3, 100),
    ]
    assert [row.metrics for row in steps] == [{"eval acc": 0.25}, {}]
    assert [row.nonfinite for row in steps] == [True, True]


def test_tabs_names_and_flags(tmp_path: Path) -> None:
    steps = read_log(table(tmp_path, "n\tce\tstepped\n1\t2.0\tTrue\n2\t2.5\t0\n"), {"step": "n", "loss": "ce"})
    assert [(row.loss, row.stepped, row.reason) for row in steps] == [(2.0, True, ""), (2.5, False, "skipped, says the log")]


def test_a_step_that_stands_twice_counts_as_it_went_last(tmp_path: Path) -> None:
    [row] = read_log(table(tmp_path, "step,loss,grad_norm\n1,9,4\n1,2,\n"), {})
    assert (row.loss, row.grad_norm) == (2.0, 4.0)


@pytest.mark.parametrize(
    ("text", "names", "message"),
    [
        ("", {}, "no column 'step'"),
        ("step,loss\n", {}, "no step"),
        ("loss\n1\n", {}, r"no column 'step'.*--column step=NAME"),
        ("step,loss\n1,x\n", {}, r"line 2, column 'loss': 'x' is no number"),
        ("step,loss\n1.5,1\n", {}, r"line 2, column 'step': '1.5' is no whole number"),
        ("step,loss\n,1\n", {}, "is no whole number"),
        ("step,loss\n-1,1\n", {}, "step -1"),
        ("step,loss\n1e30,1\n", {}, "step 1"),
        ("step,loss\n1,1,1\n", {}, "3 cells under 2 headings"),
        ("step,loss,loss\n1,1,1\n", {}, "two columns named 'loss'"),
        ("step,loss,train_loss\n1,1,1\n", {}, r"'loss' and 'train_loss' both fit; choose one: --column loss=loss"),
        ("step,loss\n1,1\n", {"loss": "ce"}, "the log has no such name"),
        ("step,loss\n1,1\n", {"los": "ce"}, "no field of a step has that name"),
        ("step,scale\n1,0\n", {}, "a loss scale is a positive number"),
        ("step,tokens\n1,1.5\n", {}, "is no count"),
        ('step,loss\n1,"1', {}, "is no table"),
        ("step,loss\n1,\0\n", {}, r"is no table|is no number"),
    ],
)
def test_a_bad_table_is_one_error_and_no_record(tmp_path: Path, text: str, names: dict[str, str], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        import_run(table(tmp_path, text), tmp_path / "run", RECIPE, DEVICE, names=names)
    assert not (tmp_path / "run").exists()


def test_what_is_no_text_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes(b"step,loss\n1,\xff\xfe\n")
    with pytest.raises(DocumentError, match="is no table"):
        read_log(tmp_path / "log.csv", {})
    with pytest.raises(DocumentError, match="cannot read"):
        read_log(tmp_path / "none.csv", {})
