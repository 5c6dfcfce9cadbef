"""The report's table of results: what a change looks like."""

import pytest
import test_report as report_tests

from flow_grpo.report import write_report


@pytest.mark.parametrize(
    ("end", "shown", "direction"),
    [
        (0.4996, "+0.000", ""),
        (0.5004, "+0.000", ""),
        (0.49, "-0.010", "down"),
        (0.51, "+0.010", "up"),
    ],
)
def test_a_change_that_rounds_to_nothing_has_no_direction(tmp_path, end, shown, direction):
    report_tests._config(tmp_path)
    for epoch, value in enumerate((0.5, end)):
        report_tests._evaluation(tmp_path, epoch, value)
        report_tests._log(tmp_path, report_tests._training(epoch))
    write_report(tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert f'<td class="change {direction}">{shown}</td>' in html
