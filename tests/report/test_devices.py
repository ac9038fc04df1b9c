from __future__ import annotations

from mpbackend.device import Device
from mpbackend.matrix import Matrix
from mpbackend.plugins import Unavailable
from mpbackend.report.devices import doctor_report, found_report, known_document, known_report
from mpbackend.report.terminal import render

HERE = Device(key="acme-1", arch="one", name="Acme 1", backend="acme", index=1, memory_bytes=2**35)
BROKEN = Device(key="acme-2", arch="two", name="Acme 2", backend="acme", usable=False, cause="no driver", remedy="install it", kind="simulated")


def test_every_known_device_is_listed(shipped: Matrix) -> None:
    text = render(known_report(shipped), 120)
    assert all(f"\n{key} " in text for key in shipped.devices)
    assert all(f"{entry.key}: " in text for entry in shipped.ambiguous.values())
    assert len(known_document(shipped)) == len(shipped.devices)


def test_peaks_known_or_not(matrix: Matrix) -> None:
    lines = {line.split()[0]: line for line in render(known_report(matrix), 120).splitlines() if line.startswith("acme-")}
    assert lines["acme-1"].endswith("bf16, fp32")
    assert "80 GB" in lines["acme-1"]
    assert lines["acme-1b"].endswith("none")
    assert "unknown" in lines["acme-1b"]
    assert "32 GiB, 64 GiB" in lines["acme-2"]
    first = known_document(matrix)[0]
    assert (first["aliases"], first["rows"], len(first["peaks"])) == (["first"], 5, 3)


def test_devices_that_do_not_work_say_why_and_what_to_do() -> None:
    text = render(found_report([HERE, BROKEN]), 120)
    assert "acme:1" in text
    assert "usable" in text
    assert "not usable (simulated): no driver; install it" in text
    assert "no installed plugin found a device" in render(found_report([]), 80)


def test_doctor() -> None:
    document = {"environment": {"python": "3.11"}, "plugins": {"mpbackend-acme": "1.0"}, "variables": {"LOCAL_RANK": "not set"}}
    broken = Unavailable("acme", "mpbackend-acme 1.0", "ImportError: no acme", "reinstall it")
    text = render(doctor_report(document, [BROKEN], [broken]), 120)
    assert "python  3.11" in text
    assert "mpbackend-acme  1.0" in text
    assert "no driver; install it" in text
    assert "acme of mpbackend-acme 1.0: ImportError: no acme; reinstall it" in text
    assert "LOCAL_RANK" in text
