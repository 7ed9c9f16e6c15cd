"""Pictures, tested as data: what they show, where it lies, and that they can be read anywhere."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes
from planted import planted

from opsmith import errors
from opsmith.benchmarking import Benchmark
from opsmith.benchmarking.plotting import (
    COLOURS,
    INK,
    PICTURES,
    format_of,
    picture_text,
    plots,
    roofline,
    save,
    scaling,
    svg,
)
from opsmith.benchmarking.text import ABOVE

SVG = "{http://www.w3.org/2000/svg}"


@cache
def small(operator: str = "demo::op") -> Benchmark:
    return planted(1, operator=operator, sizes=(1024, 2048), directions=("forward",))


def points(axes: Axes, colour: str) -> set[tuple[float, float]]:
    found = [line for line in axes.get_lines() if line.get_color() == colour]
    return {(float(x), float(y)) for line in found for x, y in zip(*line.get_data(), strict=True)}


def test_the_roofline_has_a_point_for_each_size_and_contender_at_its_place() -> None:
    made = planted(1)
    panels = roofline(made).axes
    assert [axes.get_title() for axes in panels] == ["forward", "backward", "forward + backward"]
    for axes, direction in zip(panels, ("forward", "backward", "both"), strict=True):
        for name, colour in zip(("native", "reference", "compiled"), COLOURS, strict=False):
            expected = set()
            for case in made.cases:
                work, timing = case.work_of(direction), case.timing(name, direction)
                assert work is not None
                assert timing is not None
                assert work.flops is not None
                expected.add((work.flops / work.bytes, work.flops / timing.spread.median))
            assert points(axes, colour) == expected


def test_a_point_above_the_roof_is_circled_and_says_why() -> None:
    slow = replace(small(), ceilings=tuple(replace(each, rate=each.rate / 1e6) for each in small().ceilings))
    assert slow.above
    circled = [text.get_text() for text in roofline(slow).legends[0].get_texts()]
    assert [text for text in circled if text.startswith("circle: faster than its ceiling, because")]
    assert ABOVE in picture_text(slow, "roofline")
    assert f"more than 100% of the roof: {ABOVE}" in str(slow)
    assert not small().above
    assert not [text for text in roofline(small()).legends[0].get_texts() if "circle" in text.get_text()]
    assert ABOVE not in str(small()) + picture_text(small(), "roofline")


def test_the_roofs_are_the_ceilings_that_were_measured() -> None:
    (axes, *_) = roofline(planted(1)).axes
    roofs = {str(line.get_label()): line.get_data() for line in axes.get_lines() if line.get_color() == INK}
    assert set(roofs) == {
        "copy of 268 MB: 10.0 GB/s",
        "copy of 262 kB: 40.0 GB/s",
        "matrices, float32: 100 GFLOP/s",
    }
    x, y = roofs["copy of 268 MB: 10.0 GB/s"]
    assert y[0] / x[0] == pytest.approx(1e10)
    assert (x[1], y[1]) == (pytest.approx(10.0), 1e11)
    assert list(roofs["matrices, float32: 100 GFLOP/s"][1]) == [1e11, 1e11]


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("name", ["_by_hand", r"$\bad$", "a$b$", "<b>&"])
def test_every_baseline_is_in_the_legend_by_its_name(picture: str, name: str) -> None:
    made = small()
    cases = [
        replace(
            case,
            contenders=(*case.contenders, replace(case.contenders[-1], name=name, left_out="")),
            timings=(*case.timings, replace(case.timings[0], contender=name)),
        )
        for case in made.cases
    ]
    drawn = svg(replace(made, cases=tuple(cases)), picture)
    root = ElementTree.fromstring(drawn)
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {name, "native", "reference"} <= texts


def test_times_grow_over_the_elements() -> None:
    made = planted(1)
    (axes, *_) = scaling(made).axes
    sizes = [case.elements for case in made.cases]
    medians = [case.timing("native", "forward") for case in made.cases]
    assert points(axes, COLOURS[0]) == {
        (size, each.spread.median) for size, each in zip(sizes, medians, strict=True) if each is not None
    }
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


@pytest.mark.slow
def test_what_was_not_counted_or_is_a_call_is_left_out() -> None:
    made = planted(1)
    uncounted = tuple(replace(case, work=()) for case in made.cases)
    (axes, *_) = roofline(replace(made, cases=uncounted)).axes
    assert points(axes, COLOURS[0]) == set()
    call = replace(made, cases=(replace(made.cases[0], role="call"),))
    assert points(scaling(call).axes[0], COLOURS[0]) == set()
    for name in PICTURES:
        assert "nothing was timed" in svg(call, name)
    assert "<svg" in svg(replace(made, ceilings=()), "roofline")


@pytest.mark.every(5)
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_can_be_read_on_any_ground_and_heard(name: str) -> None:
    text = svg(small(), name)
    root = ElementTree.fromstring(text)
    assert root.findtext(f"{SVG}title") == f"demo::op: {name}"
    assert "native is fastest with" in (root.findtext(f"{SVG}desc") or "")
    width, height = (root.get("viewBox") or "").split()[2:]
    assert root[2].attrib == {"width": width, "height": height, "fill": "#ffffff"}
    sizes = [float(each.attrib["font-size"]) for each in root.iter() if "font-size" in each.attrib]
    assert min(sizes) >= 12
    assert len([each for each in root.iter(f"{SVG}text") if each.text]) > 10  # letters, not outlines


@pytest.mark.parametrize("name", PICTURES)
def test_in_a_page_it_takes_the_colours_of_the_page_and_needs_no_style(name: str) -> None:
    text = svg(small(), name, inline=True)
    root = ElementTree.fromstring(text)
    assert "currentColor" in text
    assert INK not in text
    assert "#ffffff" not in text
    assert "style=" not in text
    assert not list(root.iter(f"{SVG}style"))
    assert root[2].tag != f"{SVG}rect"


@pytest.mark.slow
def test_identifiers_of_two_pictures_do_not_meet_and_each_is_found() -> None:
    made = [*plots(small()).values(), *plots(small("demo::another")).values()]
    identifiers = [re.findall(r' id="([^"]+)"', text) for text in made]
    every = [each for found in identifiers for each in found]
    assert len(every) == len(set(every)) > 20
    for text, found in zip(made, identifiers, strict=True):
        used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
        assert used
        assert used <= set(found)


@pytest.mark.slow
def test_the_same_benchmark_is_the_same_picture() -> None:
    assert plots(small()) == plots(small())


def test_the_description_names_the_fastest_and_its_part_of_the_ceiling() -> None:
    made = planted(1, sizes=(1024,), directions=("forward",))
    assert re.fullmatch(
        r"N=1024, forward: native is fastest with 1\.\d\d ms, 0\.0% of the ceiling",
        picture_text(made, "roofline"),
    )
    assert "ceiling" not in picture_text(made, "scaling")


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_pictures_are_written_beside_one_another(kind: str, tmp_path: Path) -> None:
    found = save(small(), tmp_path / f"op.{kind}")
    assert found == [tmp_path / f"op-roofline.{kind}", tmp_path / f"op-scaling.{kind}"]
    beginning = {"svg": b"<svg", "png": b"\x89PNG", "pdf": b"%PDF"}[kind]
    assert all(each.read_bytes().startswith(beginning) for each in found)


@pytest.mark.slow
def test_formats_and_places_that_there_are_not_are_refused(tmp_path: Path) -> None:
    for name in ("op.gif", "op", "svg"):
        with pytest.raises(errors.UsageError, match="the format of the picture is not supported") as raised:
            format_of(Path(name))
        assert raised.value.expected == "`.svg`, `.png`, `.pdf`"
    with pytest.raises(errors.UsageError, match="no file can be written to") as raised:
        save(small(), tmp_path / "none" / "op.svg")
    assert raised.value.got == "No such file or directory"


def test_without_matplotlib_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opsmith.benchmarking.plotting")
    for name in [each for each in sys.modules if each.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errors.MissingExtraError, match="need the package `matplotlib`") as raised:
        __import__("opsmith.benchmarking.plotting")
    assert "pip install '.[benchmark]'" in (raised.value.hint or "")
