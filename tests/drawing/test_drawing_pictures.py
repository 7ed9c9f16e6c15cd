"""Pictures, as data: what DOT says, what Graphviz makes of it, how long it may take, what a page holds."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from drawn import network, row_e1

import opsmith
from opsmith import errors
from opsmith.drawing import Graph, Options, encoded, figure, to_dot, to_page, trace
from opsmith.drawing.captions import WORDS
from opsmith.drawing.graph import Edge, Node, format_bytes
from opsmith.drawing.graphviz import STYLES
from opsmith.drawing.grouping import FEW, MANY, with_references

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '</script><script>alert("&")</script>\x00\u2028 ${title} \\N'


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(network(), Options(inputs=torch.rand(3, 4), training=True))


def chain(count: int) -> Graph:
    leaf = torch.rand(3, requires_grad=True)
    result = leaf
    for number in range(count):
        result = result.sin() if number % 3 else result * leaf
    return trace(result, Options(title="chain"))


def texts(svg: bytes) -> set[str]:
    return {"".join(each.itertext()) for each in ElementTree.fromstring(svg).iter(f"{SVG}text")}


def test_an_svg_shows_every_node_with_its_form(graph: Graph) -> None:
    data, note = encoded(graph, "svg", show_attrs=True)
    assert note == ""
    found = texts(data)
    assert {"opsmith::linear", "first.0.weight", "SinBackward0", "[3, 8] float32", "eps: 1e-05"} <= found
    drawn = {
        each.get("id") for each in ElementTree.fromstring(data).iter(f"{SVG}g") if each.get("class") == "node"
    }
    assert {node.id for node in graph.nodes} <= drawn


def test_attributes_stand_on_nodes_only_where_asked(graph: Graph) -> None:
    assert "eps: 1e-05" not in texts(encoded(graph, "svg")[0])


@pytest.mark.parametrize(("form", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_each_format_is_one(form: str, start: bytes) -> None:
    y, _ = row_e1()
    data, _ = encoded(trace(y), form)
    assert data.startswith(start)
    assert len(data) > 3000


@pytest.mark.parametrize("suffix", ["svg", "SVG", "png", "pdf", "dot", "gv", "html", "htm", "json"])
def test_the_suffix_tells_the_format(suffix: str, tmp_path: Path) -> None:
    y, _ = row_e1()
    opsmith.draw(y, tmp_path / f"graph.{suffix}")
    assert (tmp_path / f"graph.{suffix}").stat().st_size > 1000


def test_dot_is_read_by_graphviz_and_holds_what_is_hostile() -> None:
    nodes = (Node("a", "input", HOSTILE, name=HOSTILE), Node("b", "output", ""))
    graph = Graph(HOSTILE, "forward", nodes, (Edge("a", "b", HOSTILE),))
    found = " ".join(texts(encoded(graph, "svg")[0]))
    assert found.count('</script><script>alert("&")</script>') >= 3
    assert "output" in found


@pytest.mark.parametrize("form", ["svg", "dot", "html", "json"])
def test_letters_that_no_file_may_hold_are_replaced(form: str) -> None:
    strange = "a\0\x1b\ud800\uffff\N{SNOWMAN}"
    graph = Graph(strange, "forward", (Node("a", "input", strange), Node("b", "output", strange)), ())
    text = encoded(graph, form)[0].decode()
    if form == "svg":
        found = texts(text.encode())
        assert "a\ufffd\ufffd\ufffd\ufffd\N{SNOWMAN}" in found
    if form == "html":
        label = data_of(text)["nodes"][0]["label"]
        assert (label[0], label[-1], "\ud800" in label) == ("a", "\N{SNOWMAN}", False)


def test_modules_in_the_working_folder_are_not_taken_for_python_s(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("re", "pygraphviz", "subprocess"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the one that was meant')")
    monkeypatch.chdir(tmp_path)
    assert encoded(graph, "svg")[0].startswith(b"<?xml")


def test_kinds_differ_in_more_than_colour() -> None:
    assert set(STYLES) == set(WORDS)
    forms = [
        tuple(sorted((key, value) for key, value in style.items() if "color" not in key))
        for style in STYLES.values()
    ]
    assert len(set(forms)) >= len(forms) - 1  # `answer` and `reference`, whose words tell them apart


def channel(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def luminance(colour: str) -> float:
    red, green, blue = (channel(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("kind", STYLES)
def test_text_and_outline_stand_out_from_the_ground(kind: Any) -> None:
    ground = luminance(STYLES[kind]["fillcolor"])
    assert (ground + 0.05) / (luminance("#111111") + 0.05) >= 7
    assert (ground + 0.05) / (luminance(STYLES[kind]["color"]) + 0.05) >= 3


def test_a_tensor_that_many_use_has_references() -> None:
    graph = chain(30)
    drawn = with_references(graph)
    uses = [edge for edge in graph.edges if graph.by_id[edge.source].kind == "accumulate"]
    assert len(uses) > FEW
    references = [node for node in drawn.nodes if node.kind == "reference"]
    assert len(references) == len({edge.target for edge in uses})
    assert with_references(chain(3)).nodes == chain(3).nodes


def test_an_operation_of_many_has_references() -> None:
    leaf = torch.rand(3, requires_grad=True)
    graph = trace(torch.stack([leaf.sin() for _ in range(MANY + 1)]))
    drawn = with_references(graph)
    labels = [node.label for node in drawn.nodes if node.kind == "reference"]
    assert labels.count("↓ StackBackward0") == MANY + 1
    stack = next(node for node in drawn.nodes if node.label == "StackBackward0")
    assert ("uses", f"{MANY + 1} others") in stack.attributes
    assert not [edge for edge in drawn.edges if edge.target == stack.id]


@pytest.mark.parametrize("subject", ["chain", "random"])
def test_256_nodes_are_all_drawn(subject: str) -> None:  # benchmarks/drawing.py: how long it takes
    graph = chain(253)
    if subject == "random":
        generator = torch.Generator().manual_seed(0)
        made = [torch.rand(3, requires_grad=True) * 1]
        for _ in range(254):
            first, second = torch.randint(max(0, len(made) - 8), len(made), (2,), generator=generator)
            made.append(made[first] + made[second])
        graph = trace(torch.stack(made).sum(), Options(title="random"))
    assert len(graph.nodes) >= 256
    data, note = encoded(graph, "svg", depth=0)
    assert note == ""
    drawn = [each.get("id") for each in ElementTree.fromstring(data).iter(f"{SVG}g")]
    assert {node.id for node in graph.nodes} <= set(drawn)


@pytest.mark.slow
def test_1000_nodes_are_drawn_unfolded_and_in_full(tmp_path: Path) -> None:
    graph = chain(1000)
    data, note = encoded(graph, "svg", depth=0)
    assert note == ""  # no attempt was given up
    drawn = {each.get("id") for each in ElementTree.fromstring(data).iter(f"{SVG}g")}
    assert {node.id for node in graph.nodes} <= drawn


def test_a_layout_that_takes_too_long_is_done_in_haste_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import subprocess

    from opsmith.drawing import graphviz

    run, calls = subprocess.run, []

    def slow_at_first(command: list[str], **options: Any) -> Any:
        calls.append(command)
        if len(calls) == 1:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return run(command, **options)

    monkeypatch.setattr(graphviz.subprocess, "run", slow_at_first)
    y, _ = row_e1()
    with pytest.warns(
        UserWarning, match="laid out with less care and straight lines, because Graphviz took too long"
    ):
        opsmith.draw(y, tmp_path / "graph.svg")
    assert "splines=line" in calls[1]
    assert "opsmith::mul" in texts((tmp_path / "graph.svg").read_bytes())


def test_what_never_ends_is_ended() -> None:
    with pytest.raises(errors.DrawingError, match="Graphviz took too long"):
        encoded(chain(300), "svg", depth=0, seconds=0.02)


def test_graphviz_s_own_words_are_in_the_error() -> None:
    from opsmith.drawing.graphviz import render

    with pytest.raises(errors.DrawingError) as caught:
        render("digraph { a -> ", "svg")
    assert caught.value.problem == "Graphviz failed"
    assert caught.value.got == "it cannot read the graph: Invalid Input"


def test_pages_and_data_need_no_graphviz(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pygraphviz" else find(name)
    )
    y, _ = row_e1()
    for suffix in ("html", "dot", "json"):
        opsmith.draw(y, tmp_path / f"graph.{suffix}")
    with pytest.raises(errors.MissingExtraError) as caught:
        opsmith.draw(y, tmp_path / "graph.svg")
    assert caught.value.message().splitlines()[-1] == (
        "  hint: pip install '.[draw]' in a checkout of opsmith; or write `.html`, `.dot` or `.json`, "
        "which need no package"
    )
    assert not (tmp_path / "graph.svg").exists()


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    read: dict[str, Any] = json.loads(found[1])
    return read


def test_a_page_holds_every_node_and_names_no_address(graph: Graph) -> None:
    page = to_page(graph)
    assert {node.id for node in graph.nodes} <= {node["id"] for node in data_of(page)["nodes"]}
    assert {group.id for group in graph.groups} == {group["id"] for group in data_of(page)["groups"]}
    addresses = set(re.findall(r"https?://[^\s\"']+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which nothing is fetched from
    assert '<link rel="icon" href="data:,">' in page


def test_what_is_hostile_stays_text() -> None:
    nodes = (Node("a", "input", HOSTILE), Node("b", "output", "y"))
    page = to_page(Graph(HOSTILE, "forward", nodes, (Edge("a", "b", HOSTILE),)))
    assert data_of(page)["nodes"][0]["label"] == HOSTILE
    assert "<script>alert" not in page
    assert page.count("</script>") == 2


def test_a_figure_is_a_part_of_any_page(graph: Graph) -> None:
    parts = figure(graph)
    assert parts.markup.startswith('<section class="opsmith-graph"')
    other = figure(trace(opsmith.ops.exp))
    assert (parts.style, parts.script) == (other.style, other.script)


def test_json_is_the_graph(graph: Graph, tmp_path: Path) -> None:
    read = json.loads(encoded(graph, "json")[0])
    assert read == json.loads(json.dumps(graph.to_dict()))
    assert (read["schema"], read["kept_bytes"]) == (1, graph.kept_bytes)
    assert len(read["nodes"]) == len(graph.nodes)


def test_two_traces_of_one_thing_are_the_same() -> None:
    y, named = row_e1()
    assert to_dot(trace(y, Options(names=named))) == to_dot(trace(y, Options(names=named)))


@pytest.mark.parametrize("form", ["svg", "dot", "html", "json"])
def test_names_that_are_no_text_do_not_stop_a_picture(form: str) -> None:
    leaf = torch.ones(2, requires_grad=True)
    graph = trace(leaf.exp(), Options(names={"a\udcff\x07\x00b": leaf}))
    data, _ = encoded(graph, form)
    data.decode()
    if form == "svg":
        ElementTree.fromstring(data)


def test_bytes_are_shown_as_people_read_them() -> None:
    found = [format_bytes(count) for count in (0, 999, 1000, 999_499, 999_500, 2_500_000, 7 * 10**9, 10**15)]
    assert found == ["0 B", "999 B", "1 kB", "999 kB", "1 MB", "2.5 MB", "7 GB", "1e+03 TB"]


@pytest.mark.slow
def test_rednet_50_is_drawn_folded(tmp_path: Path) -> None:
    from opsmith.ops.rednet import rednet

    model = rednet(50)
    images = torch.rand(1, 3, 64, 64)
    model(images)  # builds the kernels
    graph = opsmith.draw(model, tmp_path / "rednet.svg", inputs=images, training=True)
    opsmith.draw(model, tmp_path / "rednet.html", inputs=images, training=True)
    assert len(graph.nodes) > 700
    assert sum(node.label == "opsmith::involution" for node in graph.nodes) == 17
    shown = " ".join(texts((tmp_path / "rednet.svg").read_bytes()))
    assert "folded:" in shown
    assert "stages.0.0" in shown
