"""A hook of mkdocs: the site's files are the repository's Markdown files, and all files that they link to."""

import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s#]+)[^)\s]*\)")


def github_slug(heading: str, separator: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", separator)


def on_config(config: Any) -> None:
    config.mdx_configs["toc"] = {"slugify": github_slug, "permalink": True}


def on_files(files: Files, config: Any) -> Files:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pages = listed.split()
    linked = {
        str((ROOT / page).parent.joinpath(link).resolve().relative_to(ROOT))
        for page in pages
        for link in LINK.findall((ROOT / page).read_text(encoding="utf-8"))
        if "://" not in link
    }
    others = sorted(path for path in linked - {*pages} if (ROOT / path).is_file())
    theme = [file for file in files if file.generated_by or file.src_dir != config.docs_dir]
    own = [
        File(path, str(ROOT), config.site_dir, config.use_directory_urls, inclusion=InclusionLevel.INCLUDED)
        for path in [*pages, *others]
    ]
    return Files([*theme, *own])
