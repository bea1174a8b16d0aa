"""What mkdocs is told: pages that lie outside of docs/ or are notebooks, and where links lead.

The pages are written for a forge, where a link is a path of the repository. On the site a link to
a page leads to that page, and one to another file of the repository becomes its path.
"""

from __future__ import annotations

import base64
import json
import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# {page of the repository: its path on the site}
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/README.md": "bench/method.md",
    "bench/results.md": "bench/results.md",
    "bench/h200-notes.md": "bench/h200-notes.md",
}
SOURCE_OF = {page: name for name, page in OUTSIDE.items()}
LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
# Code, which stays as it is: fences, indented lines, and what backticks enclose.
CODE = re.compile(r"^```.*?^```$|^ {4}[^\n]*$|(?<!`)`[^`\n]+`(?!`)", re.M | re.S)


def site_path(path: str) -> str | None:
    """The site's path of a file of the repository; None where the site does not have it."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    return page_of(path.removeprefix("docs/")) if path.startswith("docs/") else None


def page_of(path: str) -> str:
    """The site's path of a file in docs/: a notebook is a page."""
    return re.sub(r"\.ipynb$", ".md", path)


def as_markdown(notebook: str, name: str) -> tuple[str, dict[str, bytes]]:
    """(the notebook as a page, {file: picture}) of its JSON; pictures are name-1.png and so on.

    Text and PNG are all that it takes, and nbconvert would bring twenty packages. An output of
    another kind is a ValueError.
    """
    parts, pictures = [], {}
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                file = f"{name}-{len(pictures) + 1}.png"
                pictures[file] = base64.b64decode(data["image/png"])
                parts.append(f"![Output of the cell above]({file})")
            elif "text" in output or "text/plain" in data:
                text = "".join(output["text"] if "text" in output else data["text/plain"])
                parts.append(f"```text\n{text.rstrip()}\n```")
            else:
                raise ValueError(f"{name}: an output of a cell is neither text nor PNG")
    return "\n\n".join(parts), pictures


def link(found: re.Match[str], source: str, page: str) -> str:
    """A link of the repository's page `source`, as the site's page `page` has it."""
    mark, text, target = found.groups()
    path, _, anchor = target.partition("#")
    if re.match(r"\w+:", target) or not path:
        return found[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    there = site_path(path)
    if there is not None:
        there = posixpath.relpath(there, posixpath.dirname(page) or ".")
        return f"{mark}[{text}]({there}{'#' + anchor if anchor else ''})"
    if not (ROOT / path).exists():
        return found[0]  # mkdocs says that it leads nowhere
    return (
        f"`{path}`" if text.strip("`") in (path, posixpath.basename(path)) else f"{text} (`{path}`)"
    )


def outside_code(text: str, source: str, page: str) -> str:
    """The page with its links changed, but for those in code.

    Code in the text of a link is kept aside with the rest and put back before the link is read.
    """
    kept: list[str] = []

    def keep(found: re.Match[str]) -> str:
        kept.append(found[0])
        return f"\x00{len(kept) - 1}\x00"

    def back(text: str) -> str:
        return re.sub(r"\x00(\d+)\x00", lambda found: kept[int(found[1])], text)

    def changed(found: re.Match[str]) -> str:
        whole = LINK.fullmatch(back(found[0]))
        return link(whole, source, page) if whole else found[0]

    return back(LINK.sub(changed, CODE.sub(keep, text)))


def deepened(text: str) -> str:
    """What is inside of a list's items moved to four columns, where mkdocs looks for it.

    A forge takes it at the column of the item's own text: three after "1. ", two after "* ".
    """
    out, column, fenced = [], 0, False
    for line in text.split("\n"):
        fenced ^= line.startswith("```")
        item = re.match(r"(?:\d\. |\* )", line)
        if item and not fenced:
            column = item.end()
        elif line.strip() and not line.startswith(" " * column):
            column = 0
        inside = column and line.strip() and not item and not fenced
        out.append(" " * (4 - column) + line if inside else line)
    return "\n".join(out)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=os.fspath(ROOT / name)))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(notebook)
        folder, name = posixpath.split(notebook.src_uri.removesuffix(".ipynb"))
        text, pictures = as_markdown(notebook.content_string, name)
        files.append(File.generated(config, page_of(notebook.src_uri), content=text))
        for file, picture in pictures.items():
            files.append(File.generated(config, posixpath.join(folder, file), content=picture))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    name = page.file.src_uri
    return deepened(outside_code(markdown, SOURCE_OF.get(name, f"docs/{name}"), name))
