"""What the web site has otherwise than GitHub: the README is its first page, and what is no page is linked on GitHub.

A hook of mkdocs (mkdocs.yml).
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r'(?<=\]\()(?!\w+:|#)([^)\s#]*)|(?<=<img src=")([^"]*)')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Return a page with its links as they are on the site."""
    readme = page.file.src_uri == "index.md"
    folder = "" if readme else posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    version = re.findall(r'^__version__ = "(.*)"', (ROOT / "torchobs/_version.py").read_text(), re.MULTILINE)[0]

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[0]))
        if not match[0] or (path.startswith("docs/") and Path(path).suffix in {".md", ".png"}):
            return posixpath.relpath(path, "docs") if readme and match[0] else match[0]
        return f"{config.repo_url}/blob/v{version}/{path}"

    return _LINK.sub(link, markdown)
