"""The cache: what was built once is found again, whole; what cannot be kept is built all the same."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opsmith import errors
from opsmith.build import cache as cache_module
from opsmith.build.cache import MANIFEST, Cache, CacheEntry, key_of, own_directory, parts_of

PARTS = {"source": "y = 2 * x", "flags": "-O3"}


class Builder:
    """Writes two files, and counts how often it was asked."""

    def __init__(self, text: str = "right") -> None:
        self.text = text
        self.times = 0

    def __call__(self, directory: Path) -> None:
        self.times += 1
        (directory / "library.so").write_text(self.text)
        (directory / "log.txt").write_text("no warnings")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "cache"
    for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")):
        if path.is_dir():
            path.chmod(0o700)


def read(entry: Any) -> str:
    return str((entry.directory / "library.so").read_text())


def built_privately(cache: Cache, build: Any = None, parts: Any = None) -> CacheEntry:
    """Return an entry that cannot be stored, which a warning says."""
    with pytest.warns(RuntimeWarning, match="kernels are built for this process alone, and not kept in"):
        return cache.obtain(parts or PARTS, build or Builder())


def test_it_is_built_once_and_then_comes_from_memory_or_disk(directory: Path) -> None:
    builder = Builder()
    cache = Cache(directory)
    assert cache.obtain(PARTS, builder).source == "built"
    assert cache.obtain(PARTS, builder).source == "memory"
    entry = Cache(directory).obtain(PARTS, builder)
    assert (entry.source, read(entry), builder.times) == ("disk", "right", 1)


def test_a_warning_that_is_an_error_does_not_build_again(directory: Path) -> None:
    builder, cache = Builder(), Cache(directory)
    cache.abandon("it is full")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="it is full"):
            cache.obtain(PARTS, builder)
        assert cache.obtain(PARTS, builder).source == "memory"
    assert builder.times == 1


@pytest.mark.parametrize("part", PARTS)
def test_another_part_is_another_entry(directory: Path, part: str) -> None:
    cache = Cache(directory)
    cache.obtain(PARTS, Builder())
    entry = cache.obtain({**PARTS, part: "other"}, Builder("other"))
    assert (entry.source, read(entry)) == ("built", "other")
    assert len(cache.entries()) == 2


def test_an_entry_says_what_it_was_built_from(directory: Path) -> None:
    entry = Cache(directory).obtain(PARTS, Builder())
    assert parts_of(entry.directory) == PARTS
    assert parts_of(directory) == {}


def test_a_build_that_raises_leaves_nothing(directory: Path) -> None:
    def build(at: Path) -> None:
        (at / "library.so").write_text("half")
        raise errors.CompileError("no")

    with pytest.raises(errors.CompileError, match="no"):
        Cache(directory).obtain(PARTS, build)
    assert [path.name for path in directory.iterdir()] == ["locks"]
    assert Cache(directory).obtain(PARTS, Builder()).source == "built"


@pytest.mark.parametrize("change", ["cut", "flipped", "grown", "gone", "linked", "replaced"])
@pytest.mark.parametrize("name", ["library.so", "log.txt", MANIFEST])
def test_a_corrupted_file_is_never_used(directory: Path, tmp_path: Path, name: str, change: str) -> None:
    path = Cache(directory).obtain(PARTS, Builder()).directory / name
    content = path.read_bytes()
    if change == "cut":
        path.write_bytes(content[:-1])
    elif change == "flipped":
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif change == "grown":
        path.write_bytes(content + b"}")
    elif change == "gone":
        path.unlink()
    elif change == "linked":
        (tmp_path / name).write_bytes(content)
        path.unlink()
        path.symlink_to(tmp_path / name)
    else:
        path.unlink()
        path.mkdir()
    builder = Builder()
    entry = Cache(directory).obtain(PARTS, builder)
    assert (entry.source, read(entry), builder.times) == ("built", "right", 1)


def test_a_file_that_was_put_into_an_entry_makes_it_another(directory: Path) -> None:
    entry = Cache(directory).obtain(PARTS, Builder())
    (entry.directory / "sitecustomize.py").write_text("")
    assert Cache(directory).obtain(PARTS, Builder()).source == "built"


@pytest.mark.parametrize(
    "manifest",
    ["[]", "null", '{"key": 3}', '{"files": []}', "\udcff", '{"files": {"a": 1}}', "[" * 100_000],
    ids=["list", "null", "key", "files", "encoding", "digest", "brackets"],
)
def test_a_manifest_that_says_something_else_is_none(directory: Path, manifest: str) -> None:
    entry = Cache(directory).obtain(PARTS, Builder())
    (entry.directory / MANIFEST).write_bytes(manifest.encode(errors="surrogateescape"))
    assert parts_of(entry.directory) == {}
    assert Cache(directory).obtain(PARTS, Builder()).source == "built"


def test_an_entry_under_a_foreign_key_is_never_used(directory: Path) -> None:
    other = {**PARTS, "source": "y = 3 * x"}
    entry = Cache(directory).obtain(other, Builder("three times"))
    entry.directory.rename(directory / key_of(PARTS))
    assert read(Cache(directory).obtain(PARTS, Builder())) == "right"


def test_what_is_left_over_of_a_killed_build_goes(directory: Path) -> None:
    cache = Cache(directory)
    directory.mkdir(mode=0o700)
    leftover = directory / f".{key_of(PARTS)}-abc"
    leftover.mkdir()
    (leftover / "library.so").write_text("half")
    cache.obtain(PARTS, Builder())
    assert not leftover.exists()


def fails(*_args: Any, **_kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["mkdtemp", "write_text", "fsync", "rename", "mkdir"])
def test_on_a_full_disk_it_is_built_for_this_process(
    directory: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Whatever cannot be written: the scratch directory, a file, the entry's name, the cache itself."""
    count = []

    def once(*args: Any, **kwargs: Any) -> Any:
        count.append(where)
        if len(count) == 1:
            fails()
        return original(*args, **kwargs)

    owner: Any = {"mkdtemp": cache_module.tempfile, "fsync": os}.get(where, Path)
    original = getattr(owner, where)
    monkeypatch.setattr(owner, where, once)
    entry = built_privately(Cache(directory))
    assert (entry.source, read(entry)) == ("private", "right")
    assert "No space left on device" in entry.reason
    monkeypatch.undo()
    assert not directory.exists() or not [path for path in directory.iterdir() if path.name != "locks"]
    assert Cache(directory).obtain(PARTS, Builder()).source == "built"


def test_where_nothing_can_be_written_it_says_so(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module.tempfile, "mkdtemp", fails)
    with pytest.raises(errors.CacheError) as caught:
        Cache(directory).obtain(PARTS, Builder())
    assert caught.value.message().splitlines() == [
        "a kernel cannot be built, because no file can be written",
        "  expected: room in the cache, or in the directory for temporary files",
        "  got: in the cache: [Errno 28] No space left on device; "
        "for temporary files: [Errno 28] No space left on device",
        "  hint: make room, or set OPSMITH_CACHE to a directory that can be written",
    ]


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    entry = built_privately(Cache(tmp_path / "cache"))
    assert entry.source == "private"
    assert "File exists" in entry.reason


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="for root no directory is read-only")
def test_a_read_only_directory_is_read(directory: Path) -> None:
    Cache(directory).obtain(PARTS, Builder())
    directory.chmod(0o500)
    assert Cache(directory).obtain(PARTS, Builder()).source == "disk"
    entry = built_privately(Cache(directory), parts={"source": "new"})
    assert (entry.source, read(entry)) == ("private", "right")


def test_a_directory_that_cannot_be_written_is_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one above, and for root too: whatever would write there is refused."""
    Cache(directory).obtain(PARTS, Builder())
    original = os.open

    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and Path(path).is_relative_to(directory):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    assert Cache(directory).obtain(PARTS, Builder()).source == "disk"
    entry = built_privately(Cache(directory), parts={"source": "new"})
    assert (entry.source, read(entry)) == ("private", "right")
    assert os.strerror(errno.EROFS) in entry.reason


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such bits")
@pytest.mark.parametrize("mode", [0o777, 0o722, 0o720, 0o1777])
def test_a_directory_that_others_can_write_into_is_refused(directory: Path, mode: int) -> None:
    Cache(directory).obtain(PARTS, Builder())
    directory.chmod(mode)
    with pytest.raises(errors.CacheError) as caught:
        Cache(directory).obtain(PARTS, Builder())
    assert caught.value.message().splitlines() == [
        "other users can write into the cache directory of built kernels",
        "  expected: a directory that this user owns, and that nobody else can write into",
        f"  got: {directory}: its mode is {mode:o}, so others can write into it",
        f"  hint: run `chmod go-w {directory}` if you own it, "
        "or set OPSMITH_CACHE to a directory that you own",
    ]
    for call in (Cache(directory).entries, Cache(directory).clear):
        with pytest.raises(errors.CacheError):
            call()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such bits")
def test_one_above_it_that_others_can_write_into_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(errors.CacheError, match=f"{shared}: its mode is 777"):
        Cache(shared / "cache").obtain(PARTS, Builder())
    shared.chmod(0o1777)  # as /tmp has it: nobody can rename what is another's
    assert Cache(shared / "cache").obtain(PARTS, Builder()).source == "built"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such bits")
def test_a_directory_of_another_user_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cache(directory).obtain(PARTS, Builder())
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(
        errors.CacheError, match=f"it belongs to user {me}, but this process runs as user {me + 1}"
    ):
        Cache(directory).obtain(PARTS, Builder())


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such bits")
def test_it_is_made_for_its_user_alone(directory: Path) -> None:
    before = os.umask(0)
    try:
        entry = Cache(directory).obtain(PARTS, Builder())
    finally:
        os.umask(before)
    for path in (directory, directory / "locks", entry.directory):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such bits")
def test_folders_on_the_way_that_it_makes_are_not_refused_under_a_loose_umask(tmp_path: Path) -> None:
    """A new user of Ubuntu has the umask 002, and no `~/.cache`."""
    before = os.umask(0o002)
    try:
        assert Cache(tmp_path / ".cache" / "opsmith").obtain(PARTS, Builder()).source == "built"
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / ".cache").stat().st_mode) == 0o700


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such bits")
@pytest.mark.parametrize("root", [65534, 0])
def test_in_a_user_namespace_root_is_the_owner_of_the_root_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: int
) -> None:
    """Apptainer and bubblewrap show what is root's as that of user 65534."""
    me, lstat = os.geteuid(), Path.lstat

    def seen(path: Path) -> os.stat_result:
        owner = me if path.is_relative_to(tmp_path) else root if path == Path(os.sep) else 65534
        state = lstat(path)
        return os.stat_result((*state[:4], owner, *state[5:]))

    monkeypatch.setattr(Path, "lstat", seen)
    cache = Cache(tmp_path / "cache")
    if root:
        assert cache.obtain(PARTS, Builder()).source == "built"
    else:
        with pytest.raises(errors.CacheError, match="it belongs to user 65534"):
            cache.obtain(PARTS, Builder())


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no process")
def test_a_forked_child_that_exits_leaves_what_its_parent_built_for_itself(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from opsmith.build.cache import Cache\n"
        "entry = Cache(Path(sys.argv[1])).obtain({}, lambda at: (at / 'a').touch())\n"
        "print(entry.source, entry.directory, flush=True)\n"
        "if not os.fork():\n"
        "    sys.exit()\n"
        "os.wait()\n"
        "print(entry.directory.is_dir())\n"
    )
    command = [sys.executable, str(script), str(tmp_path / "cache")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert (printed[0], printed[2]) == ("private", "True")
    assert not Path(printed[1]).exists()


def test_one_that_hangs_does_not_hang_the_next(directory: Path) -> None:
    from filelock import FileLock

    Cache(directory).obtain({"source": "other"}, Builder())
    with FileLock(directory / "locks" / f"{key_of(PARTS)}.lock"):
        entry = built_privately(Cache(directory, wait_s=0.05))
    assert (entry.source, read(entry)) == ("private", "right")
    assert entry.reason == "another process has been building it for 0 s"


def test_where_there_are_no_locks_it_is_built_for_this_process(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoLocks:
        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr("filelock.FileLock", NoLocks)
    entry = built_privately(Cache(directory))
    assert (entry.source, entry.reason) == ("private", "FileSystem does not appear to support flock")


def test_clearing_removes_all_entries_and_says_how_many(directory: Path) -> None:
    cache = Cache(directory)
    assert cache.clear() == 0
    cache.obtain(PARTS, Builder())
    cache.obtain({"source": "other"}, Builder())
    (directory / "a file of somebody's").write_text("")
    assert len(cache.entries()) == 2
    assert cache.clear() == 2
    assert cache.entries() == []
    assert sorted(path.name for path in directory.iterdir()) == ["a file of somebody's", "locks"]
    assert cache.obtain(PARTS, Builder()).source == "built"


def test_what_is_cleared_by_another_while_it_is_built_is_built_for_this_process(directory: Path) -> None:
    builder = Builder()

    def build(at: Path) -> None:
        builder(at)
        if builder.times == 1:
            Cache(directory).clear()

    entry = built_privately(Cache(directory), build)
    assert (entry.source, read(entry), builder.times) == ("private", "right", 2)


def test_a_manifest_is_text_that_people_can_read(directory: Path) -> None:
    entry = Cache(directory).obtain(PARTS, Builder())
    manifest = json.loads((entry.directory / MANIFEST).read_text())
    assert manifest["parts"] == PARTS
    assert set(manifest["files"]) == {"library.so", "log.txt"}


def test_it_warns_once(directory: Path) -> None:
    directory.write_text("")
    cache = Cache(directory)
    built_privately(cache)
    assert cache.obtain({"source": "other"}, Builder()).source == "private"


def test_a_cache_that_is_abandoned_builds_for_this_process(directory: Path) -> None:
    cache = Cache(directory)
    assert cache.obtain(PARTS, Builder()).source == "built"
    cache.abandon("noexec")
    entry = built_privately(cache)
    assert (entry.source, entry.reason, read(entry)) == ("private", "noexec", "right")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such bits")
def test_a_link_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    """Another user would swap the link after it was checked."""
    real, shared = tmp_path / "real", tmp_path / "shared"
    real.mkdir(mode=0o700)
    shared.mkdir()
    (shared / "link").symlink_to(real)
    shared.chmod(0o777)
    with pytest.raises(errors.CacheError, match=f"{shared}: its mode is 777"):
        Cache(shared / "link" / "cache").obtain(PARTS, Builder())
    shared.chmod(0o700)
    (tmp_path / "second").symlink_to(shared / "link")
    cache = Cache(tmp_path / "second" / "cache")
    entry = cache.obtain(PARTS, Builder())
    assert entry.directory.parent == own_directory(cache.directory, "OPSMITH_CACHE") == real / "cache"
    shared.chmod(0o777)
    with pytest.raises(errors.CacheError, match=f"{shared}: its mode is 777"):
        Cache(tmp_path / "second" / "cache").obtain(PARTS, Builder())


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root gives files away")
def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    os.lchown(tmp_path / "link", 12345, -1)
    with pytest.raises(errors.CacheError, match=f"{tmp_path}/link: it belongs to user 12345"):
        Cache(tmp_path / "link" / "cache").obtain(PARTS, Builder())


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such bits")
@pytest.mark.parametrize("name", ["", "library.so", MANIFEST])
def test_an_entry_that_others_can_write_is_built_again(directory: Path, name: str) -> None:
    entry = Cache(directory).obtain(PARTS, Builder())
    (entry.directory / name).chmod(0o777)
    assert Cache(directory).obtain(PARTS, Builder()).source == "built"
    assert Cache(directory).obtain(PARTS, Builder()).source == "disk"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such bits")
def test_files_that_a_loose_umask_leaves_open_are_closed(directory: Path) -> None:
    before = os.umask(0)
    try:
        entry = Cache(directory).obtain(PARTS, Builder())
    finally:
        os.umask(before)
    assert not any(path.stat().st_mode & 0o022 for path in entry.directory.iterdir())
    assert Cache(directory).obtain(PARTS, Builder()).source == "disk"
