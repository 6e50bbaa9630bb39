"""``python -m benchmarks gpu`` where there is no GPU."""

from __future__ import annotations

from benchmarks.suite import command, gpu


def test_without_a_gpu_it_says_so_in_one_line_and_starts_no_ranks(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "list_physical_devices", lambda kind: [])
    monkeypatch.setattr(command, "detect_launcher", lambda: None)
    monkeypatch.setattr(command, "launch", None)  # whoever calls it fails
    assert command.main(["gpu", "-n", "2"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("python -m benchmarks: CuPy sees no GPU here") and printed.err.count("\n") == 1
