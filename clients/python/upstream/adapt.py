"""Replaces the storages with Tidegate's in a copy of the test suite of `limits`."""

from __future__ import annotations

import sys
from pathlib import Path

UTILS = '''
ALL_STORAGES = {
    "tidegate": pytest.param(f"tidegate://{os.environ['TIDEGATE_HOST']}", {}, None, id="tidegate")
}
ALL_STORAGES_ASYNC = {
    "tidegate": pytest.param(
        f"async+tidegate://{os.environ['TIDEGATE_HOST']}", {}, None, id="tidegate"
    )
}

'''


def edit(path: Path, old: str, new: str) -> None:
    """Replaces a string that occurs once. Fails if a new version of the suite has changed it."""
    text = path.read_text()
    if text.count(old) != 1:
        sys.exit(f"{path}: expected to find {old!r} once, found it {text.count(old)} times")
    path.write_text(text.replace(old, new))


def adapt(tests: Path) -> None:
    edit(tests / "utils.py", "\nall_storage = ", f"{UTILS}\nall_storage = ")
    edit(
        tests / "test_storage.py",
        'pytest.param("memory://", {}, MemoryStorage, None, id="in-memory")',
        parameters("", "TidegateStorage"),
    )
    edit(
        tests / "aio/test_storage.py",
        """pytest.param(
            "async+memory://",
            {},
            MemoryStorage,
            None,
            marks=pytest.mark.memory,
            id="in-memory",
        )""",
        parameters("async+", "AsyncTidegateStorage"),
    )
    for file in ("test_storage.py", "aio/test_storage.py"):
        imports = "import os\nimport time\n\nfrom tidegate.limits import *\n"
        edit(tests / file, "\nimport time\n", f"\n{imports}")


def parameters(prefix: str, storage: str) -> str:
    uri = f"f\"{prefix}tidegate://{{os.environ['TIDEGATE_HOST']}}\""
    return f'pytest.param({uri}, {{}}, {storage}, None, id="tidegate")'


if __name__ == "__main__":
    adapt(Path(sys.argv[1]))
