"""Run as a program: kernels are built where the cache, or the folder for temporary files, is a broken place.

Its arguments are a folder of its own, and the environment variable that names the place. Each call runs in a
fork, as a user with no rights where this one is root. Prints one JSON object: what each place led to.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from children import NOBODY, REFUSED, RIGHT, import_modules_of, observed
from kernel_torture import use

VARIABLES = ("OPSMITH_CACHE", "XDG_CACHE_HOME", "HOME", "TMPDIR")
STRANGER = 54321
"""Another user."""
WARNING = "RuntimeWarning: kernels are built for this process alone"

Place = Callable[[Path], str | None]
"""Function that makes a place in a folder, and returns the value of the variable; None to leave it unset."""


def named(name: str) -> Place:
    """A place of this name, which is not there yet."""
    return lambda at: name.replace("AT", str(at))


def folder(name: str = "place", mode: int = 0o700, below: str = "") -> Place:
    def make(at: Path) -> str:
        (at / name).mkdir()
        own(at / name)
        (at / name).chmod(mode)
        return str(at / name / below)

    return make


def file(below: str = "") -> Place:
    def make(at: Path) -> str:
        (at / "file").write_text("mine")
        own(at / "file")
        return str(at / "file" / below)

    return make


def link(to: str, below: str = "") -> Place:
    def make(at: Path) -> str:
        (at / "link").symlink_to(to.replace("AT", str(at)))
        return str(at / "link" / below)

    return make


def foreign(mode: int = 0o755, linked: bool = False) -> Place:
    """A folder of another user, where this one is root and can make it; else one of root."""

    def make(at: Path) -> str:
        place = at / "foreign"
        if os.geteuid():
            place = Path("/usr")
        else:
            place.mkdir()
            os.chown(place, STRANGER, STRANGER)
            place.chmod(mode)
        return str(link(str(place))(at) if linked else place)

    return make


def loop(at: Path) -> str:
    (at / "one").symlink_to(at / "two")
    (at / "two").symlink_to(at / "one")
    return str(at / "one")


def fifo(at: Path) -> str:
    os.mkfifo(at / "fifo")
    own(at / "fifo")
    return str(at / "fifo")


def listening(at: Path) -> str:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(at / "socket"))
    own(at / "socket")
    return str(at / "socket")


def full(at: Path) -> str:
    """A folder in which the names that the cache uses are taken by files."""
    for name in ("locks", "index", "opsmith", ".cache"):
        (at / "place").mkdir(exist_ok=True)
        (at / "place" / name).write_text("")
    own(at / "place")
    return str(at / "place")


PLACES: dict[str, Place] = {
    "good": folder(),
    "unset": lambda _: None,
    "empty": named(""),
    "missing": named("AT/a/b/c"),
    "file": file(),
    "below a file": file("a"),
    "no permission": folder(mode=0),
    "below no permission": folder(mode=0, below="a/b"),
    "not writable": folder(mode=0o500),
    "below not writable": folder(mode=0o500, below="a"),
    "write only": folder(mode=0o300),
    "no search": folder(mode=0o600),
    "writable by all": folder(mode=0o777),
    "writable by the group": folder(mode=0o770),
    "below writable by all": folder(mode=0o777, below="a"),
    "sticky": folder(mode=0o1777),
    "below sticky": folder(mode=0o1777, below="a"),
    "names taken": full,
    "foreign": foreign(),
    "foreign, writable": foreign(0o777),
    "foreign, sticky": foreign(0o1777),
    "foreign, forbidden": foreign(0o700),
    "link to foreign": foreign(linked=True),
    "link to foreign, writable": foreign(0o777, linked=True),
    "link to a good folder": lambda at: link(str(folder()(at)))(at),
    "dangling link": link("AT/none"),
    "below a dangling link": link("AT/none", "a"),
    "dangling link into nothing": link("AT/none/of/them"),
    "relative link": link("../none"),
    "link to itself": link("link"),
    "loop of links": loop,
    "below a loop": lambda at: f"{loop(at)}/a",
    "link to /dev/full": link("/dev/full"),
    "link to /": link("/"),
    "relative": named("relative"),
    "relative, above": named("../above"),
    "dot": named("."),
    "dots": folder("a", below="../b"),
    "slashes": named("/AT//a///b/"),
    "tilde": named("~/cache"),
    "dash": named("-rf"),
    "too long a name": named("AT/" + "n" * 300),
    "too long a path": named("AT" + "/long" * 1000),
    "long path": named("AT" + "/long" * 40),
    "not UTF-8": named("AT/\udcff\udcfe"),
    "letters": named("AT/łódź-資料-😀"),
    "spaces": named("AT/ a  b "),
    "a space": named(" "),
    "quotes": named("AT/a'b\"c`d"),
    "newline": named("AT/a\nb"),
    "tab and escape": named("AT/a\t\x1b[31m\x07"),
    "backslash": named("AT/a\\b\\n"),
    "shell": named("AT/$HOME;$(touch hacked)&|>x"),
    "wildcards": named("AT/[a]*?{b}"),
    "format": named("AT/%s%n{0}{x}"),
    "comma": named("AT/a,b"),
    "colon": named("AT/a:b"),
    "equals": named("AT/a=b#c@d"),
    "FIFO": fifo,
    "below a FIFO": lambda at: f"{fifo(at)}/a",
    "socket": listening,
    "/": named("/"),
    "below /": named("/opsmith-nowhere"),
    "/root": named("/root/opsmith"),
    "/usr": named("/usr"),
    "/dev/null": named("/dev/null"),
    "below /dev/null": named("/dev/null/a"),
    "/dev/full": named("/dev/full"),
    "/dev/fd": named("/dev/fd"),
    "/proc": named("/proc"),
    "/proc/self": named("/proc/self"),
    "below /proc": named("/proc/self/nothing"),
    "/sys": named("/sys"),
}


def own(path: Path) -> None:
    """Give a path and what is in it to the user of the children."""
    if os.geteuid() == 0:
        for each in (path, *path.rglob("*")):
            os.chown(each, NOBODY, NOBODY, follow_symlinks=False)


def attempt(at: Path, variable: str, place: Place) -> dict[str, Any]:
    """Use kernels once with a place, in a new folder; return the status, and what was printed or left."""
    for name in ("", "home", "tmp", "work"):
        (at / name).mkdir(mode=0o755)
        own(at / name)
    variables: dict[str, str | None] = {
        "OPSMITH_CACHE": os.devnull if variable == "TMPDIR" else None,  # all is built among temporary files
        "XDG_CACHE_HOME": None,
        "HOME": str(at / "home"),
        "TMPDIR": str(at / "tmp"),
    }
    value = variables[variable] = place(at)

    def call() -> None:
        os.chdir(at / "work")
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        tempfile.tempdir = None
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        use()

    before = set(at.rglob("*"))
    status, printed = observed(call)
    new = set(at.rglob("*")) - before
    inside = {at / "home/.cache"}  # where the variable does not count
    if variable != "TMPDIR" and value:
        inside.add(Path(os.path.realpath(at / "work" / value)))
    outside = [path for path in new if not any(path == each or each in path.parents for each in inside)]
    parents = {parent for each in inside for parent in each.parents}
    return {
        "status": status,
        "printed": printed,
        "outside": sorted(str(path.relative_to(at)) for path in outside if path not in parents),
    }


def is_clear(status: int, printed: str) -> bool:
    """Return True for right results with one warning at most, and for an error of opsmith's."""
    if status == REFUSED:
        return "\n  hint: " in printed and "Traceback" not in printed
    return status == RIGHT and (not printed or printed.count("Warning") == printed.count(WARNING) == 1)


def places(at: Path, variable: str) -> dict[str, Any]:
    """Try each place."""
    if os.geteuid() == 0:
        at.chmod(0o755)
    figures: dict[str, Any] = {"places": 0, "right": 0, "warned": 0, "refused": 0, "unclear": {}}
    import_modules_of(use)  # and the compiler of this test remembers each file
    for name, place in PLACES.items():
        found = attempt(at / str(figures["places"]), variable, place)
        figures["places"] += 1
        figures["right"] += found["status"] == RIGHT
        figures["warned"] += found["status"] == RIGHT and bool(found["printed"])
        figures["refused"] += found["status"] == REFUSED
        if not is_clear(found["status"], found["printed"]) or found["outside"]:
            figures["unclear"][name] = found
        shutil.rmtree(at / str(figures["places"] - 1), ignore_errors=True)
    return figures


if __name__ == "__main__":
    _, folder_of_its_own, variable = sys.argv
    sys.stdout.write(json.dumps(places(Path(folder_of_its_own), variable)) + "\n")
