"""The session file by itself: what is written is read again, every altered or missing byte is found, and whatever ends a save leaves the old file or
the new one."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53 import partialfile, sessionfile
from glm53.errors import SessionFileError
from glm53.sessionfile import Header, Section, SessionFile, check_target, read_header, save, weights_fingerprint

ROOT = Path(__file__).resolve().parent.parent
ROWS = 9000  # two pieces of keys, more of rows
SAMPLING = {"temperature": 0.5, "seed": 2**64 - 1, "stop": ["ä"]}


def header(rows: int = ROWS, **changes: Any) -> Header:
    sections = (
        Section("tokens", 1, 4, rows),
        Section("rows", 3, 656, rows),
        Section("keys", 2, 512, rows),
        Section("mtp.hidden", 1, 96, min(rows, 1)),
    )
    values = {"model": {"n_layers": 3}, "weights": "ab" * 32, "weight_format": "bf16", "dtype": "bf16", "row_format": "q8g64"}
    return Header(**values | {"rows": rows, "sections": sections, "sampling": SAMPLING, "pending": (7,)} | changes)


def content(section: Section, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, *section.name.encode()])
    return rng.integers(0, 256, (section.planes, section.rows, section.row_bytes), dtype=np.uint8)


def reader(of: Header, seed: int = 0) -> Callable[[Section, int, np.ndarray], None]:
    data = {section.name: content(section, seed) for section in of.sections}

    def read(section: Section, first: int, target: np.ndarray) -> None:
        target[:] = data[section.name][:, first : first + target.shape[1]]

    return read


def assert_holds(path: Path, of: Header, seed: int = 0) -> None:
    """The whole content of a file, by name."""
    found = {section.name: np.zeros((section.planes, section.rows, section.row_bytes), np.uint8) for section in of.sections}
    with SessionFile(path) as file:
        assert file.header == of
        for section, first, data in file.pieces():
            found[section.name][:, first : first + data.shape[1]] = data
    for section in of.sections:
        np.testing.assert_array_equal(found[section.name], content(section, seed), err_msg=section.name)


def partials(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if "partial" in path.name]


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, ROWS])
def test_round_trip(rows: int, tmp_path: Path) -> None:
    path, of, told = tmp_path / "s.glm53", header(rows), []
    size = save(path, of, reader(of), lambda done, total, name: told.append((done, total)))
    assert size == path.stat().st_size and not partials(tmp_path)
    assert_holds(path, of)
    assert read_header(path) == (of, size)
    if rows:
        assert told[-1] == (of.data_bytes, of.data_bytes) and [done for done, _ in told] == sorted(done for done, _ in told)
    again = tmp_path / "again"
    save(again, of, reader(of))
    assert again.read_bytes() == path.read_bytes()


def test_pieces_are_bounded() -> None:
    """A piece has 64 rows or 8 MiB, whatever the history: four of them are what a save holds."""
    for planes, row_bytes in ((78, 656), (79, 2304), (10, 656), (21, 256), (1, 4)):
        section = Section("rows", planes, row_bytes, 1 << 20)
        assert section.piece_rows % 64 == 0
        assert section.piece_bytes <= max(sessionfile.PIECE_BYTES, 64 * planes * row_bytes)
        assert sessionfile.BUFFERS * section.piece_bytes <= 256 << 20
    for bad in (("rows", 0, 4, 1), ("rows", 1, 4, -1), ("other", 1, 4, 1), ("rows", 1 << 20, 1 << 10, 64)):
        with pytest.raises(ValueError):
            Section(*bad)


def regions(path: Path) -> dict[str, range]:
    """Parts of a file by name."""
    with SessionFile(path) as file:
        head, of, size = file._header_bytes, file.header, file.size
    contents = size - 44 - 40 * sum(section.pieces for section in of.sections)
    found = {"magic": range(8), "version": range(8, 12), "lengths and checksums": range(12, 24), "header": range(24, 24 + head)}
    at = 24 + head
    for section in of.sections:
        assert at % 4096 == 0
        found[section.name] = range(at, at + section.nbytes)
        found[f"filling of {section.name}"] = range(at + section.nbytes, at + section.stored_bytes)
        at += section.stored_bytes
    assert at == contents
    found = {name: region for name, region in found.items() if region}
    return found | {"contents": range(contents, size - 44), "trailer": range(size - 44, size)}


def test_every_altered_byte_is_found(tmp_path: Path) -> None:
    """One bit anywhere: in each part at its ends and at random places."""
    path, of, rng = tmp_path / "s.glm53", header(700), random.Random(1)
    save(path, of, reader(of))
    whole = path.read_bytes()
    for name, region in regions(path).items():
        places = {region[0], region[-1], *(rng.choice(region) for _ in range(12))}
        if name in ("lengths and checksums", "trailer", "magic"):
            places = set(region)
        for place in places:
            bad = bytearray(whole)
            bad[place] ^= 1 << rng.randrange(8)
            path.write_bytes(bad)
            with pytest.raises(SessionFileError) as error, SessionFile(path) as file:
                file.verify()
            assert str(path) in str(error.value) and "next:" in str(error.value), (name, place)
    path.write_bytes(whole)
    assert_holds(path, of)


def test_damage_is_named(tmp_path: Path) -> None:
    path, of = tmp_path / "s.glm53", header()
    save(path, of, reader(of))
    place = regions(path)["rows"][5_000_000]
    with path.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 1]))
    with pytest.raises(SessionFileError, match=r"rows 0 to \d+ of section rows, bytes \d+ to \d+: checksum"), SessionFile(path) as file:
        file.verify()


def test_truncations_and_additions(tmp_path: Path) -> None:
    path, of = tmp_path / "s.glm53", header(700)
    save(path, of, reader(of))
    whole = path.read_bytes()
    ends = {0, 1, 7, 8, 23, 24, 25, len(whole) - 1, len(whole) - 43, len(whole) - 44, len(whole) - 45}
    for region in regions(path).values():
        ends |= {region[0], region[0] + 1, region[-1]}
    for end in sorted(ends):
        path.write_bytes(whole[:end])
        with pytest.raises(SessionFileError, match=r"truncated|is no session file") as error, SessionFile(path) as file:
            file.check_complete()
        assert "wanted" in str(error.value) or "alone" in str(error.value), end
    path.write_bytes(whole + b"\0")
    with pytest.raises(SessionFileError, match="longer than its header says"), SessionFile(path) as file:
        file.check_complete()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path, of = tmp_path / "s.glm53", header()
    save(path, of, reader(of))
    with SessionFile(path) as file:
        file.check_complete()
        os.truncate(path, regions(path)["keys"][10])
        with pytest.raises(SessionFileError, match="truncated"):
            file.verify()


def sealed(text: bytes, version: int = sessionfile.VERSION) -> bytes:
    """Prefix and header with right checksums."""
    prefix = sessionfile._PREFIX.pack(sessionfile.MAGIC, version, len(text), zlib.crc32(text), 0)[:-4]
    return prefix + zlib.crc32(prefix).to_bytes(4, "little") + text


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"", "is no session file"),
        (b"hello, world, this is a text of some length", "is no session file"),
        (b"GGUF" + bytes(100), "is no session file"),
        (sessionfile.MAGIC.replace(b"\n", b"\r\n") + bytes(40), "is no session file"),  # went through a text mode
        (sealed(b"{}", version=2), "version 2, wanted 1"),
        (sealed(b"{}"), "header that cannot be used"),
        (sealed(b"not json"), "header that cannot be used"),
        (sealed(b"[" * 100_000), "header that cannot be used"),
        (sealed(header().encode().replace(b'"mtp.hidden"', b'"rows"')), "header that cannot be used"),
        (sealed(header().encode().replace(b'"planes":3', b'"planes":-3')), "header that cannot be used"),
        (sealed(header().encode().replace(b'"planes":3', b'"planes":1e99')), "header that cannot be used"),
        (sealed(header().encode().replace(b'"pending":[7]', b'"pending":[-7]')), "header that cannot be used"),
        (sealed(header().encode().replace(b'"rows":9000,"sampling"', b'"rows":"x","sampling"')), "header that cannot be used"),
        (sealed(header().encode().replace(b'"weights":', b'"wights":')), "header that cannot be used"),
        (sealed(header(2**39).encode()), "truncated"),
    ],
)
def test_foreign_files(data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(data)
    with pytest.raises(SessionFileError, match=reason), SessionFile(path) as file:
        file.check_complete()


def test_places_that_are_no_files(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(SessionFileError, match="cannot be read"), SessionFile(path):
            pass
    of = header(64)
    for path in (tmp_path, tmp_path / "absent" / "s"):
        with pytest.raises(SessionFileError, match="cannot be saved"):
            save(path, of, reader(of))
        with pytest.raises(SessionFileError, match="cannot be saved"):
            check_target(path)
    assert not list(tmp_path.iterdir())
    check_target(tmp_path / "s")


@pytest.mark.parametrize("kind", ["text", "pipe", "device"])
def test_what_is_no_session_file_stays(kind: str, tmp_path: Path) -> None:
    """A save neither replaces nor takes over what it did not write; reading a pipe is refused at once."""
    path, of = tmp_path / "s", header(64)
    make_foreign(path, kind)
    before = os.lstat(path)
    for refused in (lambda: save(tmp_path / "s", of, reader(of)), lambda: check_target(tmp_path / "s")):
        with pytest.raises(
            SessionFileError, match=f"cannot be saved: {'a file of that name is no session file' if kind == 'text' else 'it is no regular file'}"
        ):
            refused()
    assert (os.lstat(path).st_ino, os.lstat(path).st_size) == (before.st_ino, before.st_size) and len(list(tmp_path.iterdir())) == 1
    with (
        pytest.raises(SessionFileError, match="is no session file" if kind == "text" else "cannot be read: it is no regular file"),
        SessionFile(path),
    ):
        pass
    for head in (b"", bytes(64), b"\x89GLM53S\nrest"):  # made for us, or a session
        path.unlink()
        path.write_bytes(head)
        assert save(path, of, reader(of)) == path.stat().st_size


def make_foreign(path: Path, kind: str) -> None:
    if kind == "text":
        path.write_text("my notes")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "session":
        save(path, header(3), reader(header(3), 5))
    else:
        path.symlink_to("/dev/null")


@pytest.mark.parametrize("kind", ["text", "pipe", "device", "session"])
def test_a_save_writes_past_files_that_have_its_partial_name(kind: str, tmp_path: Path) -> None:
    """Whatever somebody keeps under the name of a partial file stays as it was, also after a save that was killed."""
    of, partial = header(64), tmp_path / ".s.partial"
    make_foreign(partial, kind)
    make_foreign(tmp_path / "s.partial", "session")
    before = os.lstat(partial)
    (tmp_path / ".s.partial-1").write_bytes(bytes(5000))  # left by a save that was killed
    check_target(tmp_path / "s")
    save(tmp_path / "s", of, reader(of))
    assert_holds(tmp_path / "s", of)
    assert (os.lstat(partial).st_ino, os.lstat(partial).st_size) == (before.st_ino, before.st_size)
    assert_holds(tmp_path / "s.partial", header(3), 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".s.partial", "s", "s.partial"]


def test_modes(tmp_path: Path) -> None:
    """A conversation is its owner's: a new file is nobody else's to read, one that is replaced keeps its mode."""
    path, of, before = tmp_path / "s", header(64), os.umask(0)
    try:
        save(path, of, reader(of))
        assert path.stat().st_mode & 0o777 == 0o600
        for mode in (0o644, 0o400, 0o660):
            path.chmod(mode)
            save(path, of, reader(of))
            assert path.stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_notes_that_are_no_json(tmp_path: Path) -> None:
    of = header(1, notes={"x": {1, 2}})
    with pytest.raises(SessionFileError, match="not JSON serializable; next: sampling and notes have to be JSON values"):
        save(tmp_path / "s", of, reader(of))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["/", "", "nul\0x", "n" * 250, "n" * 300])
def test_names_that_no_file_can_have(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = header(1)
    monkeypatch.chdir(tmp_path)
    for refused in (lambda: save(path, of, reader(of)), lambda: check_target(path)):
        with pytest.raises(SessionFileError, match=r"cannot be saved: .*; next: "):
            refused()
    with pytest.raises(SessionFileError, match="; next: "):
        SessionFile(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"sampling": [1]}, {"sampling": "x"}, {"weights": 5}, {"dtype": 4}, {"weight_format": None}, {"row_format": []}, {"rows": 10**30},
        {"pending": [1, 2]}, {"pending": ["1"]}, {"pending": 3}, {"prompt_rows": -1}, {"prompt_rows": 1 << 30}, {"notes": []}, {"notes": None},
        {"model": []}, {"more": 1}, {"sections": 3}, {"sections": [3]},
    ],
    ids=str,
)  # fmt: skip
def test_headers_of_odd_content(change: dict[str, Any], tmp_path: Path) -> None:
    """Sealed right, so that only what it says is wrong."""
    path = tmp_path / "s"
    text = json.dumps(json.loads(header().encode()) | change).encode()
    path.write_bytes(sealed(text))
    with pytest.raises(SessionFileError, match=r"has a header that cannot be used: .*; next: use the glm53 that wrote it"):
        SessionFile(path)


def test_files_without_the_later_fields(tmp_path: Path) -> None:
    """Written before prompt rows and notes were kept: they have none."""
    value = json.loads(header().encode())
    del value["prompt_rows"], value["notes"]
    (tmp_path / "s").write_bytes(sealed(json.dumps(value).encode()))
    with SessionFile(tmp_path / "s") as file:
        assert file.header == header() and file.header.prompt_rows == 0 and file.header.notes == {}


class FakeOs:
    """The module `os` with one function replaced."""

    def __init__(self, **replaced: Any):
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def patch_os(monkeypatch: pytest.MonkeyPatch, fake: FakeOs) -> None:
    for module in (sessionfile, partialfile):
        monkeypatch.setattr(module, "os", fake)


@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "fsync", "replace", "ftruncate"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_disk_that_refuses(call: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space, or an error of the disk, at the n-th call: the old file stays as it was, and no partial one."""
    path, old, of = tmp_path / "s.glm53", header(64), header()
    save(path, old, reader(old, 1))
    calls = 0

    def refuse(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(errno.ENOSPC if call == "pwrite" else errno.EIO, os.strerror(errno.ENOSPC if call == "pwrite" else errno.EIO))
        return getattr(os, call)(*arguments)

    patch_os(monkeypatch, FakeOs(**{call: refuse}))
    monkeypatch.setattr(sessionfile, "SYNC_BYTES", 1 << 20)
    failed = False
    try:
        save(path, of, reader(of))
    except SessionFileError as error:
        failed = True
        assert "cannot be saved" in str(error) and ("No space left" in str(error)) is (call == "pwrite"), error
    monkeypatch.undo()
    assert failed is (calls >= nth), f"{call}: {calls} calls"
    renamed = not failed or (call, nth) == ("fsync", 3)  # the third one is that of the directory
    assert_holds(path, of if renamed else old, 0 if renamed else 1)
    assert os.listdir(tmp_path) == ["s.glm53"]


def test_order_of_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is on the disk before it has its name, and the name is on the disk before save returns: what a power failure would show."""
    made: list[str] = []

    def noted(call: str) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            made.append("fsync directory" if call == "fsync" and os.path.isdir(f"/proc/self/fd/{arguments[0]}") else call)
            return getattr(os, call)(*arguments, **named)

        return run

    patch_os(monkeypatch, FakeOs(**{call: noted(call) for call in ("pwrite", "fsync", "replace", "unlink")}))
    of = header()
    save(tmp_path / "s", of, reader(of))
    assert made[-5:] == ["fsync", "pwrite", "fsync", "replace", "fsync directory"] and set(made[:-5]) == {"pwrite"}


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, of = tmp_path / "s.glm53", header(700)
    patch_os(monkeypatch, FakeOs(pwrite=lambda fd, data, at: os.pwrite(fd, data[: (len(data) // 2) & -4096 or len(data)], at)))
    save(path, of, reader(of))
    monkeypatch.undo()
    assert_holds(path, of)


def test_too_little_space_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = header()
    full = lambda fd: os.statvfs_result((4096, 4096, 100, 10, 10, 0, 0, 0, 0, 255))
    patch_os(monkeypatch, FakeOs(fstatvfs=full))
    with pytest.raises(SessionFileError, match=r"the session has \d+ B .* its disk 40960 B"):
        save(tmp_path / "s", of, lambda *_: pytest.fail("rows were read"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("piece", [0, 1, 5])
def test_an_error_of_the_reader_leaves_nothing(piece: int, tmp_path: Path) -> None:
    path, old, of, calls = tmp_path / "s.glm53", header(64), header(), 0
    save(path, old, reader(old, 1))

    def read(section: Section, first: int, target: np.ndarray) -> None:
        nonlocal calls
        calls += 1
        if calls > piece:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(path, of, read)
    assert_holds(path, old, 1)
    assert os.listdir(tmp_path) == ["s.glm53"]


def test_two_saves_of_one_name(tmp_path: Path) -> None:
    """The second one is refused while the first is at work, which then succeeds; a link is followed."""
    real, link, of = tmp_path / "real", tmp_path / "link", header(700)
    link.symlink_to(real)
    inside, go = threading.Event(), threading.Event()

    def slow(section: Section, first: int, target: np.ndarray) -> None:
        inside.set()
        assert go.wait(30)
        reader(of)(section, first, target)

    thread = threading.Thread(target=save, args=(link, of, slow))
    thread.start()
    try:
        assert inside.wait(30)
        with pytest.raises(SessionFileError, match="is being saved by somebody else"):
            save(real, of, reader(of))
        assert partials(tmp_path) == [".real.partial"]
    finally:
        go.set()
        thread.join()
    assert link.is_symlink()
    assert_holds(real, of)
    assert not partials(tmp_path)


# Each stage: the function before or after which the process stops, and at which of its calls.
STAGES = [
    ("open", 1, "after"),  # the partial file exists
    ("ftruncate", 1, "after"),
    ("pwrite", 1, "before"),
    ("pwrite", 1, "after"),  # the header is written
    ("pwrite", 3, "after"),  # some pieces are
    ("pwrite", 6, "before"),
    ("fsync", 1, "before"),  # everything is written
    ("fsync", 1, "after"),
    ("fsync", 2, "before"),  # the first bytes say what it is
    ("fsync", 2, "after"),
    ("replace", 1, "before"),
    ("replace", 1, "after"),  # the new file is in place
    ("fsync", 3, "before"),
    ("fsync", 3, "after"),
]
# A process without threads that forks one for each stage, kills it there, and says which it did not find at its place.
CHILD = """
import os, signal, sys, time
sys.path[:0] = [{root!r}, {tests!r}]
import test_sessionfile as t
of = t.header()
for number, (call, nth, when) in enumerate(t.STAGES):
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        calls = 0
        def stop():
            os.write(here, b"x")
            time.sleep(60)
        def wrapped(*arguments, **named):
            global calls
            calls += 1
            mine = calls
            if (mine, when) == (nth, "before"):
                stop()
            result = getattr(os, call)(*arguments, **named)
            if (mine, when) == (nth, "after"):
                stop()
            return result
        t.sessionfile.os = t.partialfile.os = t.FakeOs(**{{call: wrapped}})
        t.save(sys.argv[1] + "/" + str(number) + "/s.glm53", of, t.reader(of))
        os._exit(0)
    os.close(here)
    if os.read(there, 1) != b"x":
        print(call, nth, when)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


def whole(path: Path) -> bool:
    """Whether a file would be taken for a session."""
    try:
        with SessionFile(path) as file:
            file.verify()
    except SessionFileError:
        return False
    return True


def test_killed_at_every_stage(tmp_path: Path) -> None:
    """After kill -9 the name holds the whole old file or the whole new one. The next save takes the partial file over, unless that is whole."""
    old, of = header(64), header()
    for number in range(len(STAGES)):
        (tmp_path / str(number)).mkdir()
        save(tmp_path / str(number) / "s.glm53", old, reader(old, 1))
    code = CHILD.format(root=str(ROOT), tests=str(ROOT / "tests"))
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert child.returncode == 0 and child.stdout == "", child.stdout + child.stderr
    for number, (call, nth, when) in enumerate(STAGES):
        directory = tmp_path / str(number)
        path = directory / "s.glm53"
        renamed = (call, when) == ("replace", "after") or (call, nth) == ("fsync", 3)
        assert_holds(path, of if renamed else old, 0 if renamed else 1)
        assert partials(directory) == ([] if renamed else [".s.glm53.partial"]), (call, nth, when)
        finished = not renamed and (call, nth) in (("fsync", 2), ("replace", 1))
        assert renamed or whole(directory / ".s.glm53.partial") is finished, (call, nth, when)
        save(path, of, reader(of))
        assert_holds(path, of)
        assert sorted(os.listdir(directory)) == [".s.glm53.partial"] * finished + ["s.glm53"]


def test_fingerprint_covers_names_headers_and_samples(tmp_path: Path) -> None:
    def write(name: str, tensor: str, data: bytes) -> None:
        head = json.dumps({tensor: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
        (tmp_path / name).write_bytes(len(head).to_bytes(8, "little") + head + data)

    body = bytes(range(256)) * 400
    write("a", "x", body)
    write("b", "y", body)
    first = weights_fingerprint(tmp_path, ["a", "b"])
    assert weights_fingerprint(tmp_path, ["b", "a"]) == first
    found = {first, weights_fingerprint(tmp_path, ["a"])}
    for tensor, data in (("z", body), ("y", body[:-1]), ("y", b"\1" + body[1:]), ("y", body[:-1] + b"\1"), ("y", b"")):
        write("b", tensor, data)
        found.add(weights_fingerprint(tmp_path, ["a", "b"]))
    assert len(found) == 7
