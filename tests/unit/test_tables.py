"""Tables: columns of text that line up, and HTML that holds what is in its cells as text."""

from __future__ import annotations

from workbench.tables import Html, html_table, text_table


def test_columns_line_up_and_no_line_ends_in_spaces() -> None:
    assert text_table([("run", "state"), ("a longer name", "")]) == "run            state\na longer name"


def test_every_cell_is_escaped_unless_it_is_html() -> None:
    page = html_table(("a & b", "c"), [("<b>x</b>", Html("<b>y</b>"))])
    assert "&lt;b&gt;x&lt;/b&gt;" in page
    assert "<b>y</b>" in page
    assert "a &amp; b" in page


def test_a_row_may_have_a_look_and_a_table_attributes() -> None:
    page = html_table((), [("a", "1"), ("b", "2")], row_styles=["", "opacity:0.6"], attributes='class="runs"')
    assert page.startswith('<table class="runs"><tbody>')
    assert page.count("<tr style='opacity:0.6'>") == page.count("<tr>") == 1
