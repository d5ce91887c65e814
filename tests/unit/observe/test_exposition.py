"""The text format to the letter, read back by a strict parser."""

from __future__ import annotations

import pytest

from tests.unit.observe.prometheus import Malformed, parse
from turnout.observe.exposition import Exposition, Histogram


def test_the_text_format():
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    out = Exposition({"model_name": 'a"b\\c\nd'})
    out.value("sglang:x_total", "counter", "Said.", 3, source="k")
    out.histogram("sglang:h_seconds", "Said too.", histogram)
    label = r'model_name="a\"b\\c\nd"'
    assert out.text().splitlines() == [
        "# HELP sglang:x_total Said.", "# TYPE sglang:x_total counter",
        f'sglang:x_total{{{label},source="k"}} 3',
        "# HELP sglang:h_seconds Said too.", "# TYPE sglang:h_seconds histogram",
        f'sglang:h_seconds_bucket{{{label},le="0.1"}} 2', f'sglang:h_seconds_bucket{{{label},le="1.0"}} 3',
        f'sglang:h_seconds_bucket{{{label},le="+Inf"}} 4', f"sglang:h_seconds_sum{{{label}}} 7.65",
        f"sglang:h_seconds_count{{{label}}} 4",
    ]  # fmt: skip
    families = parse(out.text())
    assert {name: family.kind for name, family in families.items()} == {
        "sglang:x_total": "counter",
        "sglang:h_seconds": "histogram",
    }
    assert families["sglang:x_total"].samples[0].labels == {"model_name": 'a"b\\c\nd', "source": "k"}


def test_samples_of_one_metric_stand_under_one_head() -> None:
    out = Exposition({})
    out.family("x", "gauge", "Said.", [({"engine": "a"}, 1), ({"engine": "b"}, 0.5)])
    out.family("y_total", "counter", "None yet.", [])
    families = parse(out.text())
    assert [(one.labels, one.value) for one in families["x"].samples] == [
        ({"engine": "a"}, 1.0),
        ({"engine": "b"}, 0.5),
    ]
    assert families["y_total"].samples == []


@pytest.mark.parametrize(
    "text",
    [
        "x 1\n",
        "# HELP x Said.\n# TYPE x gauge\nx 1",
        "# HELP x Said.\n# TYPE x gauge\nx 1\nx 2\n",
        "# HELP x Said.\n# TYPE x counter\nx 1\n",
        "# HELP x Said.\n# TYPE x gauge\n# HELP x Said.\n# TYPE x gauge\nx 1\n",
        '# HELP x Said.\n# TYPE x gauge\nx{a-b="1"} 1\n',
        '# HELP x Said.\n# TYPE x gauge\nx{a="\\d"} 1\n',
        '# HELP h Said.\n# TYPE h histogram\nh_bucket{le="1"} 2\nh_bucket{le="+Inf"} 1\nh_sum 1\nh_count 1\n',
        '# HELP h Said.\n# TYPE h histogram\nh_bucket{le="1"} 1\nh_sum 1\nh_count 1\n',
    ],
)
def test_the_parser_is_strict(text: str) -> None:
    with pytest.raises(Malformed):
        parse(text)
