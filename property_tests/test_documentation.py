"""The generated pages say what the code says."""

from pathlib import Path

import pytest

from moe_numerics.documentation import pages

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("name", ["profiles.md", "paths.md"])
def test_a_generated_page_is_up_to_date(name: str) -> None:
    """Fault: a path or a choice changed and the page that users read did not."""
    assert (DOCS / name).read_text() == pages()[name], "run python -m moe_numerics.documentation docs"


def test_every_visible_choice_has_an_input() -> None:
    """Fault: a choice that changes no bit, so that two profiles differ in name only."""
    assert "none found" not in pages()["profiles.md"]
