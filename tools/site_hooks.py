"""Three steps of `make docs`, which mkdocs calls (mkdocs.yml names this file).

A page that mkdocs.yml gives no place in the navigation goes under "More", so no page is lost.
Pages name each other by file, which is how a reader of a checkout finds them. On the site, a link
has the title of its page. At the end, every link must lead to a file and, in it, to an anchor.
mkdocs itself checks the links between pages; this check also covers generated pages and folders.
"""

from __future__ import annotations

import html.parser
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_NAMED = re.compile(r"\[[\w./-]+\.md\](\(([\w./-]+\.md)(?:#[\w-]+)?\))")


def titled(text: str, folder: Path) -> str:
    """Return a page of `folder` with titles in place of file names as the texts of links.

    The name of a page that does not begin with its title stays.
    """

    def title(link: re.Match[str]) -> str:
        head = (folder / link[2]).read_text().partition("\n")[0]
        return f"[{head[2:].partition(':')[0]}]{link[1]}" if head.startswith("# ") else link[0]

    return _NAMED.sub(title, text)


def unplaced(navigation: str, docs: Path) -> list[str]:
    """Return the pages of a folder that the text of mkdocs.yml does not name, but for logs."""
    found = (path for path in docs.rglob("*.md") if path.parent.name != "logs")
    placed = set(re.findall(r" ([\w/]+\.md)$", navigation, re.M))
    return sorted({str(path.relative_to(docs)) for path in found} - placed)


def on_config(config: Any, **_: Any) -> None:
    """Place the pages that have no place yet."""
    text = Path(config["config_file_path"]).read_text()
    rest: list[Any] = unplaced(text, Path(config["docs_dir"]))
    if rest:
        config["nav"].append({"More": rest})


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Give links the titles of their pages."""
    return titled(markdown, Path(page.file.abs_src_path).parent)


class _Page(html.parser.HTMLParser):
    """The links and the anchors of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep an element's links and its id."""
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.add(value)
            elif value and name in ("id", "name"):
                self.anchors.add(value)


def broken(site: Path) -> list[str]:
    """Return "page: link" for each link inside the site that leads nowhere."""
    pages = {path.resolve(): _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        if path.parent.name == "logs" or path.name == "404.html":
            continue  # former pages; a page whose links are absolute
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else None
            missing = anchors is not None and parts.fragment and parts.fragment not in anchors
            if not target.exists() or (missing and not parts.fragment.startswith("__")):
                wrong.append(f"{path.relative_to(site.resolve())}: {link}")
    return wrong


def on_post_build(config: Any, **_: Any) -> None:
    """Fail the build if a link leads nowhere."""
    wrong = broken(Path(config["site_dir"]))
    if wrong:
        raise SystemExit("links that lead nowhere:\n" + "\n".join(wrong))
