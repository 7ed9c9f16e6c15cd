"""Build the site of the documentation into out/site: `make docs`.

Zensical renders the pages of one folder. So all are gathered in out/pages first: those of docs/, and what
they link to in the repository. Beside the site stand texts for language models (https://llmstxt.org).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import griffe

ROOT = Path(__file__).resolve().parents[2]
DOCS, PAGES, SITE = ROOT / "docs", ROOT / "out" / "pages", ROOT / "out" / "site"
SETTINGS = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
LANGUAGES = {".py": "python", ".cpp": "cpp", ".cu": "cuda", ".cuh": "cuda", ".toml": "toml"}

RULES = ROOT / "src" / "opsmith" / "rules"
READ_RULES = "import json; from opsmith.rules import pages; print(json.dumps(pages()))"

_LINK = re.compile(r"`[^`]*`|(?<=\]\()([^)\s#:]+)(?=[#)])")
_API = re.compile(r"^::: (\S+)$", re.MULTILINE)


@cache
def rules() -> dict[Path, str]:
    """Return the page of each rule by its file. The `python` that is first on PATH imports opsmith."""
    done = subprocess.run(["python", "-c", READ_RULES], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stderr}docs: `python` must be able to import opsmith: run `make docs`")
    return {RULES / name: text for name, text in json.loads(done.stdout).items()}


def text_of(path: Path) -> str:
    """Return the text of a file, or of the page that opsmith makes of it."""
    text = rules().get(path) or path.read_text(encoding="utf-8")
    if path == DOCS / "rules.md":  # the site lists all rules in place of the sections
        tables = rules()[RULES / "index.md"].partition("\n\n")[2].replace("](", "](../src/opsmith/rules/")
        return f"{text.partition('## ')[0]}{tables}"
    return text


def place(path: Path) -> str:
    """Return where a file of the repository stands in the site, as the path of its source."""
    if path == ROOT / "README.md":
        return "index.md"
    if path in rules():
        return path.relative_to(RULES.parent).as_posix()
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".ipynb":
        return name.replace(".ipynb", ".md")
    return name if path.suffix == ".md" else f"source/{name}.md"


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a page outside of its fences, with their positions."""
    fence = ""
    for position, line in enumerate(text.split("\n")):
        mark = re.match(r"`{3,}", line)
        if mark and fence in ("", line):
            fence = "" if fence else mark[0]
        elif not fence:
            yield position, line


def linked(page: Path) -> list[Path]:
    """The files that a page links to."""
    found = [name for _, line in prose(text_of(page)) for name in _LINK.findall(line)]
    targets = [(page.parent / name).resolve() for name in found if name]
    return [path for path in targets if path.is_file() and path.is_relative_to(ROOT)]


def moved(page: Path) -> str:
    """Return a page whose links lead to the places that files have in the site."""
    lines = text_of(page).split("\n")

    def link(found: re.Match[str]) -> str:
        target = (page.parent / found[1]).resolve() if found[1] else ROOT
        if not target.is_file() or not target.is_relative_to(ROOT):
            return found[0]  # Zensical names a dead link
        return Path(os.path.relpath(place(target), Path(place(page)).parent)).as_posix()

    for position, line in prose("\n".join(lines)):
        lines[position] = _LINK.sub(link, line)
    return "\n".join(lines)


def shown(path: Path) -> str:
    """Return a page that shows a file of code, or a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return notebook(path, json.loads(text)["cells"])
    language = LANGUAGES.get(path.suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path.name}\n\n````{language}\n{text}````\n"


def notebook(path: Path, cells: list[dict[str, Any]]) -> str:
    """Return the page of a notebook, with a button for Colab where the settings have `repo_url`."""
    shown = []
    for cell in cells:
        text = "".join(cell["source"])
        shown.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    if repository := SETTINGS.get("repo_url"):
        file = f"{urlsplit(repository).path.strip('/')}/blob/main/{path.relative_to(ROOT).as_posix()}"
        button = f"[Open in Colab](https://colab.research.google.com/github/{file}){{ .md-button }}"
        install = f"%pip install 'opsmith[all] @ git+{repository}'"
        shown.insert(1, f"{button}\n\nRun this cell first there:\n\n```python\n{install}\n```")
    return "\n\n".join(shown) + "\n"


def gather() -> None:
    """Write all pages and pictures into one folder."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(DOCS, PAGES, ignore=shutil.ignore_patterns("*.md", "*.py", "__pycache__"))
    ahead, done = [ROOT / "README.md", *DOCS.rglob("*.md")], set[Path]()
    while ahead:
        path = ahead.pop()
        target = PAGES / place(path)
        if path in done or target.exists():
            continue
        done.add(path)
        is_page = path.suffix == ".md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(moved(path) if is_page else shown(path), encoding="utf-8")
        ahead += linked(path) if is_page else []


def described(name: str) -> Iterator[str]:
    """Yield the text of a public name and of its parts."""
    for each in public(name):
        if not each.is_module:
            callable_ = each.is_function or each.is_class
            yield f"## {each.path}\n\n```python\n{each.signature() if callable_ else each.name}\n```"
        if each.docstring:
            yield each.docstring.value


@cache
def package() -> griffe.Object | griffe.Alias:
    """Return opsmith as its source has it: nothing of it is imported."""
    return griffe.load("opsmith", search_paths=[ROOT / "src"], resolve_aliases=True)


def public(name: str) -> Iterator[griffe.Object | griffe.Alias]:
    """Yield what a name stands for, and its public parts."""
    ahead = [package()[name.removeprefix("opsmith.")] if name != "opsmith" else package()]
    while ahead:
        each = ahead.pop()
        yield each
        parts = sorted(each.all_members.values(), key=lambda part: part.name, reverse=True)
        ahead += [part for part in parts if part.is_public and not (part.is_special or part.is_module)]


def without_docstring() -> list[str]:
    """Names in the reference that lack a docstring; fields are described by their class."""
    pages = [page.read_text(encoding="utf-8") for page in sorted((DOCS / "reference").glob("*.md"))]
    parts = [part for page in pages for name in _API.findall(page) for part in public(name)]
    return [part.path for part in parts if not part.docstring and not part.is_attribute]


def navigation(entries: list[dict[str, Any]], part: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield part, title and path of each page in the order of the navigation."""
    for entry in entries:
        for title, content in entry.items():
            if isinstance(content, str):
                yield part, title, content
            else:
                yield from navigation(content, part or title)


def summary(text: str) -> str:
    """Return the first sentence of a page."""
    paragraphs = "\n".join(line for _, line in prose(text)).split("\n\n")
    words = next((each for each in paragraphs if re.match(r"\s*[\w*`\"\[](?!``)", each)), "")
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(words.replace("**", "").split()))
    return re.split(r"(?<=[.:]) ", words, maxsplit=1)[0].rstrip(":")


def write_texts() -> None:
    """Write llms.txt, llms-full.txt, and the Markdown of each page beside it."""
    index, full, before = [f"# {SETTINGS['site_name']}", "", f"> {SETTINGS['site_description']}"], [], None
    pages = [("Rules", path.stem, place(path)) for path in rules() if path.stem != "index"]
    for part, title, path in [*navigation(SETTINGS["nav"]), *pages]:
        text = (PAGES / path).read_text(encoding="utf-8")
        text = _API.sub(lambda found: "\n\n".join(described(found[1])), text).strip() + "\n"
        (SITE / path).write_text(text, encoding="utf-8")
        index += ["", *([f"## {part}", ""] if part else [])] if part != before else []
        index.append(f"- [{title}]({path}): {summary(text)}")
        full.append(f"<!-- {path} -->\n\n{text}")
        before = part
    (SITE / "llms.txt").write_text("\n".join(index) + "\n", encoding="utf-8")
    (SITE / "llms-full.txt").write_text("\n".join(full), encoding="utf-8")


def main() -> None:
    """Build the site, or exit with the reason why it cannot be built."""
    lacking = without_docstring()
    if lacking:
        sys.exit(f"docs: no docstring: {', '.join(lacking)}")
    gather()
    shutil.rmtree(SITE, ignore_errors=True)
    zensical = Path(sys.executable).with_name("zensical")
    command = [zensical, "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=ROOT, check=False, text=True, capture_output=True)
    said = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)  # Zensical colours each letter
    sys.stdout.write(said)
    if done.returncode or "griffe: " in said:
        sys.exit("docs: a warning ends the build; it names the page, or the docstring")
    (SITE / "404.html").unlink(missing_ok=True)  # its links work only where the site is the root of a host
    write_texts()
    print(f"The site is in {SITE.relative_to(ROOT)}: open index.html in a browser, from disk.")


if __name__ == "__main__":
    main()
