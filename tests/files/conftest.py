"""In tests of files a warning is an error, and transformers says nothing."""

from __future__ import annotations

import pytest

MARKS = pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("quiet_transformers")


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in MARKS:
        item.add_marker(mark, append=False)  # what a file or a test is marked with counts more
