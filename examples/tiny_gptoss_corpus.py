"""Turn the documentation that Debian packages ship into plain prose for ``train_tiny_gptoss.py``.

Nothing is downloaded here. Get the packages with ``apt-get download PACKAGE``, unpack each with
``dpkg -x FILE.deb DIR`` (no installation needed), then name every source once::

    python examples/tiny_gptoss_corpus.py corpus/ kjv=kjv.txt rust=DIR/usr/share/doc/rust-doc/html/book ...

A source is a folder of HTML pages, or a text file whose paragraphs are separated by blank lines (verse
numbers at line starts are dropped). ``kjv.txt`` is what ``bible -l100000 "ge1:1-re22:21"`` prints. A name given
more than once collects all its paths. The output folder gets one ``NAME.txt`` for each name: one paragraph a
line, one blank line between documents. models/tiny-gptoss/README.md lists the packages and their licences.
"""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

# Where prose starts and ends. Everything inside SKIPPED is code, navigation or decoration.
BLOCKS = frozenset("p li dd dt td th h1 h2 h3 h4 h5 h6 blockquote div section article br summary".split())
SKIPPED = frozenset("pre script style nav header footer table svg form button h1 h2 h3 h4 h5 h6 dt".split())
SKIPPED_CLASSES = frozenset(
    "sphinxsidebar related footer toctree-wrapper navheader navfooter programlisting sidebar headerlink"
    " code-attribute highlight".split()
)
VOID = frozenset("area base br col embed hr img input link meta source track wbr".split())
PUNCTUATION = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "—": " - ", "–": "-", "…": "...", "\xa0": " ", "¶": ""}
)


class ProseParser(HTMLParser):
    """Collects the text of the paragraphs of one page in ``paragraphs``."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._open_skipped: list[str] = []  # stack of open tags since the outermost skipped one
        self._text: list[str] = []

    def _flush(self) -> None:
        self.paragraphs.append("".join(self._text))
        self._text = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID:
            return
        classes = (dict(attrs).get("class") or "").split()
        if self._open_skipped:
            if tag == self._open_skipped[0]:  # only same-name nesting matters to find the matching end tag
                self._open_skipped.append(tag)
        elif tag in SKIPPED or not SKIPPED_CLASSES.isdisjoint(classes):
            if tag in BLOCKS or tag == "pre":
                self._flush()
            self._open_skipped.append(tag)
        elif tag in BLOCKS:
            self._flush()

    def handle_endtag(self, tag: str) -> None:
        if self._open_skipped:
            if tag == self._open_skipped[0]:
                self._open_skipped.pop()
        elif tag in BLOCKS:
            self._flush()

    def handle_data(self, data: str) -> None:
        if not self._open_skipped:
            self._text.append(data)


def is_prose(paragraph: str) -> bool:
    """At least five words, mostly letters, plain ASCII, ending as a sentence does."""
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return (
        paragraph.isascii()
        and len(paragraph.split()) >= 5
        and paragraph[-1] in ".?!:;"
        and letters >= 0.85 * len(paragraph)
        and not re.search(r"\S{40}", paragraph)
    )


def documents(path: Path) -> Iterator[list[str]]:
    """The documents of one source, each a list of raw paragraphs, in a fixed order."""
    if path.is_file() and ".htm" not in path.name:
        text = path.read_text(encoding="utf-8", errors="replace")
        for part in re.split(r"\n\s*\n", text):
            yield [" ".join(re.sub(r"^\s*\d+\s", "", line).strip() for line in part.splitlines())]
        return
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    pages = [page for page in found if re.search(r"\.html(\.en)?(\.gz)?$", page.name)]
    for page in pages:
        raw = gzip.decompress(page.read_bytes()) if page.suffix == ".gz" else page.read_bytes()
        parser = ProseParser()
        parser.feed(raw.decode("utf-8", errors="replace"))
        parser.close()
        yield parser.paragraphs


def main(arguments: list[str]) -> None:
    if len(arguments) < 2 or not all("=" in source for source in arguments[1:]):
        sys.exit(__doc__)
    output = Path(arguments[0])
    output.mkdir(parents=True, exist_ok=True)
    sources: dict[str, list[Path]] = {}
    for source in arguments[1:]:
        name, _, path = source.partition("=")
        sources.setdefault(name, []).append(Path(path))
    seen: set[str] = set()  # API pages repeat themselves: a paragraph counts once, digits ignored
    for name, paths in sources.items():
        kept: list[str] = []
        for document in (document for path in paths for document in documents(path)):
            paragraphs = []
            for raw in document:
                paragraph = " ".join(raw.translate(PUNCTUATION).split())
                key = re.sub(r"\d+", "0", paragraph.lower())
                if paragraph and key not in seen and is_prose(paragraph):
                    seen.add(key)
                    paragraphs.append(paragraph)
            if paragraphs:
                kept.append("\n".join(paragraphs))
        text = "\n\n".join(kept) + "\n"
        (output / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name}: {len(kept)} documents, {len(text)} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
