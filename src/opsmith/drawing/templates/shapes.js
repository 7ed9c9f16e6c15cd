// Shapes of nodes and edges: elements, outlines, curves.
const opsmithShapes = (() => {
  const pen = document.createElement("canvas").getContext("2d");
  const family = "system-ui, -apple-system, 'Segoe UI', sans-serif";
  const make = (name, attributes = {}, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const element = (name, text, ...inside) => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    made.append(...inside);
    return made;
  };
  const cut = text => text.length > 46 ? text.slice(0, 45) + "…" : text;

  function sign(x, y, text) {
    const made = make("g", { class: "toggle" });
    made.append(make("circle", { class: "sign", cx: x, cy: y, r: 7.5 }), make("text", { x, y: y + 4, class: "plain" }, text));
    return made;
  }

  // Spread the ends of edges that share a target, in the order of their starts.
  function fan(edges) {
    const ends = new Map();
    for (const edge of edges) (ends.get(edge.b) ?? ends.set(edge.b, []).get(edge.b)).push(edge);
    for (const all of ends.values()) {
      if (all.length < 2) continue;
      const width = all[0].points.at(-1).box?.w ?? 40, step = Math.min(26, (width - 16) / all.length);
      all.sort((a, b) => a.points.at(-2).x - b.points.at(-2).x);
      all.forEach((edge, at) => {
        const end = edge.points.at(-1);
        edge.row = at % 2;
        edge.points[edge.points.length - 1] = { ...end, x: end.x + (at - (all.length - 1) / 2) * step };
      });
    }
  }

  function curve(points) {
    let text = `M${points[0].x.toFixed(1)},${points[0].y.toFixed(1)}`;
    for (let at = 1; at < points.length; at++) {
      const [a, b] = [points[at - 1], points[at]];
      const bend = Math.max(Math.abs(b.y - a.y) / 2, 6) * (b.y >= a.y ? 1 : -1);
      text += `C${a.x.toFixed(1)},${(a.y + bend).toFixed(1)} ${b.x.toFixed(1)},${(b.y - bend).toFixed(1)} ${b.x.toFixed(1)},${b.y.toFixed(1)}`;
    }
    return text;
  }

  function outline(kind, w, h) {
    const r = n => n.toFixed(1);
    if (kind === "input" || kind === "constant") return `M12,0H${r(w - 12)}L${r(w)},${r(h / 2)}L${r(w - 12)},${r(h)}H12L0,${r(h / 2)}Z`;
    if (kind === "output" || kind === "accumulate") return `M0,${r(h / 2)}A${r(w / 2)},${r(h / 2)} 0 1 1 ${r(w)},${r(h / 2)}A${r(w / 2)},${r(h / 2)} 0 1 1 0,${r(h / 2)}Z`;
    if (kind === "parameter" || kind === "buffer") return `M0,5A${r(w / 2)},5 0 0 1 ${r(w)},5V${r(h - 5)}A${r(w / 2)},5 0 0 1 0,${r(h - 5)}ZM0,5A${r(w / 2)},5 0 0 0 ${r(w)},5`;
    if (kind === "saved" || kind === "base") return `M0,0H${r(w - 9)}L${r(w)},9V${r(h)}H0ZM${r(w - 9)},0V9H${r(w)}`;
    if (kind === "module") return `M0,6H6L10,0H34L38,6H${r(w)}V${r(h)}H0Z`;
    const c = kind === "operation" ? 7 : 1;
    return `M${c},0H${r(w - c)}Q${r(w)},0 ${r(w)},${c}V${r(h - c)}Q${r(w)},${r(h)} ${r(w - c)},${r(h)}H${c}Q0,${r(h)} 0,${r(h - c)}V${c}Q0,0 ${c},0Z`;
  }

  function sized(id, node, group) {
    const small = node.kind === "accumulate" || node.kind === "reference";
    const lines = [cut(node.label), ...(small ? [] : node.lines.map(cut))];
    let width = 0;
    lines.forEach((line, at) => {
      pen.font = at || small ? `10px ${family}` : `700 12px ${family}`;
      width = Math.max(width, pen.measureText(line).width);
    });
    const side = group ? 52 : { input: 30, constant: 30, output: 36, accumulate: 44 }[node.kind] ?? 22;
    const high = { output: 20, parameter: 20, buffer: 20 }[node.kind] ?? (group ? 16 : 12);
    return { id, lines, small, kind: group ? (group.kind === "operator" ? "operator" : "module") : node.kind,
      w: Math.max(44, width + side), h: 15 + (lines.length - 1) * 12.5 + (small ? (node.kind === "accumulate" ? 8 : 2) : high) };
  }

  function drawNode(item, folded) {
    const made = make("g", { class: `node ${item.kind}`, transform: `translate(${item.left.toFixed(1)},${item.top.toFixed(1)})`, "data-id": item.id });
    made.append(make("path", { class: "shape", d: outline(item.kind, item.w, item.h) }));
    if (item.kind === "operator") {
      const ring = make("path", { class: "shape second", d: outline("operator", item.w + 6, item.h + 6), transform: "translate(-3,-3)" });
      made.append(ring);
    }
    const folder = item.kind === "module" ? 3 : item.kind === "parameter" || item.kind === "buffer" ? 2 : 0;
    let y = (item.h - (15 + (item.lines.length - 1) * 12.5)) / 2 + 11.5 + folder;
    const strong = ["operator", "parameter", "input", "output", "module"].includes(item.kind);
    item.lines.forEach((line, at) => {
      made.append(make("text", { x: (item.w / 2).toFixed(1), y: y.toFixed(1), class: at || item.small ? "small" : strong ? "strong" : "plain" }, line));
      y += at ? 12.5 : 13.5;
    });
    if (folded) made.append(sign(item.w - 13, 14, "+"));
    made.append(make("title", {}, item.lines.join("\n")));
    return made;
  }
  return { make, element, cut, sign, sized, drawNode, fan, curve, outline, pen, family };
})();
