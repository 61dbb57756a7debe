"""Check the built site: every link of its pages leads to a file and, in it, to an anchor.

mkdocs calls `on_post_build` at the end of `make docs` (mkdocs.yml names this file). mkdocs itself
checks the links between pages; this check also covers generated pages, pictures and folders.
"""

from __future__ import annotations

import html.parser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


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
