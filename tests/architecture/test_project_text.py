"""What no text of the repository may hold: paths of somebody's machine, and hosts of package registries.

In: every file that is tracked or would be. Out: failures that name file and line. Strings searched for are put together
here, so that this file does not match itself.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
BINARY_SUFFIXES = {".png", ".jpg", ".gif", ".ico", ".pdf", ".parquet", ".safetensors", ".pt", ".npz"}
MACHINE_PATHS = tuple("/" + name + "/" for name in ("work", "root", "home", "Users", "mnt"))
REGISTRY_HOSTS = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("pypi", "nvidia", "com"),
        ("conda", "anaconda", "org"),
        ("registry", "npmjs", "org"),
        ("proxy", "golang", "org"),
    )
)
FORBIDDEN = re.compile(
    "|".join(
        [rf"(?<![\w.$}}/-]){re.escape(path)}" for path in MACHINE_PATHS] + [re.escape(host) for host in REGISTRY_HOSTS]
    )
)


def project_files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        # An unpacked archive has no git: what its folders hold was tracked.
        parts = ("rlmegatron", "tests", "tools", "launch", "yaml_configs", "docs", ".ci", "README.md", "setup.py")
        found = [path for part in parts for path in (ROOT / part, *(ROOT / part).rglob("*"))]
        listed = [str(path.relative_to(ROOT)) for path in found]
    return sorted(
        name
        for name in listed
        if (ROOT / name).is_file() and Path(name).suffix not in BINARY_SUFFIXES and "__pycache__" not in name
    )


def breaches(text: str) -> list[tuple[int, str]]:
    return [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if FORBIDDEN.search(line)]


def test_the_search_finds_what_it_is_for_and_nothing_else() -> None:
    bad = [f"cd {MACHINE_PATHS[0]}x", f'"{MACHINE_PATHS[1]}.cache"', f"https://{REGISTRY_HOSTS[0]}/simple"]
    good = ["net" + MACHINE_PATHS[0] + "x", "a package on PyPI", "$HOME" + MACHINE_PATHS[0], "/tmp/x"]
    assert [number for number, _ in breaches("\n".join(bad + good))] == [1, 2, 3]


def test_text_names_no_machine_and_no_registry() -> None:
    found = {name: breaches((ROOT / name).read_bytes().decode("utf-8", errors="replace")) for name in project_files()}
    assert {name: lines for name, lines in found.items() if lines} == {}
