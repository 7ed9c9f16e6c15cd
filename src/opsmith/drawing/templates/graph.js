for (const figure of document.querySelectorAll(".opsmith-graph")) {
  const data = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
  const [svg, aside, status] = [".canvas svg", "aside", "[role=status]"].map(each => figure.querySelector(each));
  const search = figure.querySelector("input");
  const { GAP } = opsmithLayout;
  const { make, element, cut, sign, sized, drawNode, fan, curve, outline, pen, family } = opsmithShapes;
  const nodes = new Map(data.nodes.map(node => [node.id, node])), groups = new Map(data.groups.map(group => [group.id, group]));
  const parent = id => nodes.has(id) ? nodes.get(id).group : groups.get(id).parent;
  let view = { x: 0, y: 0, k: 1 }, shown = new Map(), drawn = [], chosen = null, here = null;

  // The visible item for a node: itself, or the outermost folded module around it.
  function standsFor(id) {
    let found = id;
    for (let each = parent(id); each !== null; each = parent(each)) if (!groups.get(each).open) found = each;
    return found;
  }
  function path(id) {
    const found = [];
    for (let each = parent(id); each !== null; each = parent(each)) found.unshift(each);
    return found;
  }

  function arrange() {
    const boxes = new Map(), links = new Map(), inside = new Map();
    const holder = id => id ?? "";
    const box = id => boxes.get(id) ?? boxes.set(id, { id }).get(id);
    const add = (holds, id) => (inside.get(holder(holds)) ?? inside.set(holder(holds), new Set()).get(holder(holds))).add(id);
    for (const id of nodes.keys()) {
      const seen = standsFor(id), around = path(seen);
      [...around, seen].forEach((each, at) => add(at ? around[at - 1] : null, each));
    }
    const edges = new Map();
    for (const [source, target, label, kind] of data.edges) {
      const [a, b] = [standsFor(source), standsFor(target)];
      if (a === b) continue;
      const key = `${a} ${b}`;
      const edge = edges.get(key) ?? edges.set(key, { a, b, labels: new Set(), kinds: new Set(), legs: [] }).get(key);
      if (label) edge.labels.add(label);
      edge.kinds.add(kind);
    }
    const leg = (edge, where, a, b) => {
      const all = links.get(holder(where)) ?? links.set(holder(where), new Map()).get(holder(where));
      const key = `${a} ${b}`;
      const link = all.get(key) ?? all.set(key, { from: a, to: b }).get(key);
      edge.legs.push({ where, link });
    };
    for (const edge of edges.values()) {
      const [up, down] = [[...path(edge.a), edge.a], [...path(edge.b), edge.b]];
      let same = 0;
      while (up[same] === down[same]) same++;
      for (let at = up.length - 1; at > same; at--) leg(edge, up[at - 1], up[at], "out " + up[at]);
      leg(edge, same ? up[same - 1] : null, up[same], down[same]);
      for (let at = same + 1; at < down.length; at++) leg(edge, down[at - 1], "in " + down[at], down[at]);
    }
    const layOut = where => {
      const items = new Map();
      for (const id of inside.get(holder(where)) ?? []) {
        const group = groups.get(id), item = box(id);
        if (group?.open) {
          const size = layOut(id);
          pen.font = `600 12px ${family}`;
          const head = pen.measureText(cut(group.label)).width + 60;
          Object.assign(item, { open: true, w: Math.max(size.w + 2 * GAP.pad, head), h: size.h + GAP.pad + GAP.head + 6, inner: size.w });
        } else Object.assign(item, sized(id, nodes.get(id) ?? group, group));
        items.set(id, item);
      }
      const all = [...(links.get(holder(where)) ?? new Map()).values()];
      for (const link of all) {
        const end = (name, side) => items.get(name) ?? items.set(name, { w: 4, h: 0, side }).get(name);
        link.a = end(link.from, "in");
        link.b = end(link.to, "out");
      }
      return opsmithLayout.place([...items.values()], all);
    };
    const size = layOut(null);
    const settle = (where, x, y) => {
      for (const id of inside.get(holder(where)) ?? []) {
        const item = box(id);
        item.left = x + item.x - item.w / 2;
        item.top = y + item.y;
        if (item.open) settle(id, item.left + (item.w - item.inner) / 2, item.top + GAP.head + 6);
      }
      for (const link of (links.get(holder(where)) ?? new Map()).values()) {
        link.points = [link.a, ...link.way, link.b].map((item, at, every) => ({
          x: x + item.x, y: y + item.y + (at === 0 ? item.h : at === every.length - 1 ? 0 : item.h / 2), box: item.id && !item.open ? item : null, frame: item.open,
        }));
      }
    };
    settle(null, 0, 0);
    for (const edge of edges.values()) {
      const points = [];
      for (const { link } of edge.legs) points.push(...link.points);
      // At the border of an open module the leg inside determines the point.
      edge.points = points.filter((point, at) => !point.frame || at === 0 || at === points.length - 1);
    }
    fan([...edges.values()]);
    shown = boxes;
    return { size, edges: [...edges.values()] };
  }

  function draw() {
    const { edges } = arrange();
    const scene = make("g", { class: "scene" });
    const mark = make("marker", { id: `arrow-${figures.indexOf(figure)}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" });
    mark.append(make("path", { class: "arrow", d: "M0,0L8,4L0,8Z" }));
    const defs = make("defs");
    defs.append(mark);
    const frames = make("g"), lines = make("g"), tops = make("g");
    const open = [...shown.values()].filter(item => item.open).sort((a, b) => path(a.id).length - path(b.id).length);
    for (const item of open) {
      const group = groups.get(item.id);
      const made = make("g", { class: `group ${group.kind}`, "data-id": item.id });
      made.append(make("rect", { class: "frame", x: item.left.toFixed(1), y: item.top.toFixed(1), width: item.w.toFixed(1), height: item.h.toFixed(1), rx: 6 }));
      const head = make("g", { class: "head" });
      head.append(make("rect", { x: item.left, y: item.top, width: item.w, height: GAP.head }));
      head.append(make("text", { class: "title", x: item.left + 26, y: item.top + 17 }, cut(group.label)));
      head.append(sign(item.left + 14, item.top + 13, "−"));
      head.append(make("title", {}, [group.label, ...group.lines].join("\n")));
      made.append(head);
      frames.append(made);
      item.at = made;
    }
    drawn = edges;
    for (const edge of edges) {
      const kind = edge.kinds.has("flow") ? "flow" : [...edge.kinds][0];
      edge.at = make("path", { class: `edge ${kind}`, d: curve(edge.points) });
      if (kind !== "saved") edge.at.setAttribute("marker-end", `url(#arrow-${figures.indexOf(figure)})`);
      lines.append(edge.at);
      const text = [...edge.labels].slice(0, 2).join(", ");
      if (text && text !== "saved") {
        const end = edge.points.at(-1), before = edge.points.at(-2);
        edge.text = make("text", { class: "label", x: (end.x + (before.x < end.x - 8 ? -6 : 5)).toFixed(1), y: (end.y - 10 - 11 * (edge.row ?? 0)).toFixed(1), "text-anchor": before.x < end.x - 8 ? "end" : "start" }, cut(text));
        lines.append(edge.text);
      }
    }
    for (const item of shown.values()) if (!item.open) { item.at = drawNode(item, groups.has(item.id)); tops.append(item.at); }
    scene.append(frames, lines, tops);
    svg.replaceChildren(defs, scene);
    move();
    emphasise();
  }

  function extent() {
    const all = [...shown.values()];
    const far = (pick, key) => pick(...all.map(key));
    return { x: far(Math.min, i => i.left), y: far(Math.min, i => i.top), r: far(Math.max, i => i.left + i.w), b: far(Math.max, i => i.top + i.h) };
  }
  function fit(least = 0.05) {
    const all = extent(), { clientWidth: w, clientHeight: h } = svg.parentElement;
    view.k = Math.max(least, Math.min(1.25, (w - 32) / (all.r - all.x), (h - 32) / (all.b - all.y)));
    view.x = Math.max(16, (w - (all.r - all.x) * view.k) / 2) - all.x * view.k;
    if ((all.r - all.x) * view.k > w) view.x = (w - (all.r - all.x) * view.k) / 2 - all.x * view.k;
    view.y = Math.max(16, (h - (all.b - all.y) * view.k) / 2) - all.y * view.k;
    move();
  }
  function move() {
    svg.querySelector(".scene")?.setAttribute("transform", `translate(${view.x.toFixed(1)},${view.y.toFixed(1)}) scale(${view.k.toFixed(4)})`);
  }
  function zoom(factor, x = svg.clientWidth / 2, y = svg.clientHeight / 2) {
    const k = Math.min(4, Math.max(0.03, view.k * factor));
    view = { k, x: x - (x - view.x) * k / view.k, y: y - (y - view.y) * k / view.k };
    move();
  }
  function centre(id) {
    const item = shown.get(id);
    if (!item) return;
    view.k = Math.max(view.k, 0.7);
    view.x = svg.clientWidth / 2 - (item.left + item.w / 2) * view.k;
    view.y = svg.clientHeight / 2 - (item.top + Math.min(item.h, 80) / 2) * view.k;
    move();
  }
  function reveal(id) { // only if it is out of sight
    const item = shown.get(id);
    if (!item) return;
    const [x, y] = [view.x + (item.left + item.w / 2) * view.k, view.y + item.top * view.k];
    if (x < 20 || x > svg.clientWidth - 20 || y < 10 || y > svg.clientHeight - 30) centre(id);
  }

  // Ancestors and descendants; a folded module stands for all its nodes.
  const next = { up: new Map(), down: new Map() };
  for (const [a, b] of [...data.edges, ...data.nodes.filter(node => node.of).map(node => node.after ? [node.id, node.of] : [node.of, node.id])]) {
    (next.down.get(a) ?? next.down.set(a, []).get(a)).push(b);
    (next.up.get(b) ?? next.up.set(b, []).get(b)).push(a);
  }
  const members = id => groups.has(id) ? data.nodes.filter(node => path(node.id).includes(id)).map(node => node.id) : [id];
  function reach(start, way) {
    const found = new Set(), pending = [...start];
    while (pending.length) for (const each of next[way].get(pending.pop()) ?? []) if (!found.has(each)) { found.add(each); pending.push(each); }
    for (const each of start) found.delete(each);
    return found;
  }
  const counts = id => ["up", "down"].map(way => reach(members(id), way));

  function emphasise() {
    const on = new Set();
    if (chosen) for (const each of [...members(chosen), ...counts(chosen).flatMap(found => [...found])]) on.add(standsFor(each));
    for (const item of shown.values()) {
      item.at.classList.toggle("faint", Boolean(chosen) && !item.open && !on.has(item.id));
      item.at.classList.toggle("chosen", item.id === chosen);
      item.at.classList.toggle("here", item.id === here);
    }
    for (const edge of drawn) {
      const lit = on.has(edge.a) && on.has(edge.b);
      for (const each of [edge.at, edge.text]) each?.classList.toggle("faint", Boolean(chosen) && !lit);
      edge.at.classList.toggle("on", Boolean(chosen) && lit);
    }
  }

  const list = (ids, beside) => {
    const made = element("ul");
    for (const id of ids) {
      const node = nodes.get(id) ?? groups.get(id), button = element("button", "", element("span", node.label));
      button.type = "button";
      const text = beside(node);
      if (text) button.append(element("small", text));
      if (node.module && node.module !== node.label) button.firstChild.append(element("em", node.module));
      button.addEventListener("click", () => choose(id, true));
      made.append(element("li", "", button));
    }
    return made;
  };
  function about() {
    const parts = [];
    for (const note of data.notes) { const made = element("p", note); made.className = "note"; parts.push(made); }
    if (data.heaviest.length) {
      const bytes = new Map(data.heaviest.map(each => [each.id, each.bytes]));
      parts.push(element("h3", "Keep the most memory"), list(bytes.keys(), node => bytes.get(node.id)));
    }
    const legend = element("ul");
    legend.className = "legend";
    for (const { kind, words } of data.kinds) {
      const sample = make("svg", { viewBox: "-2 -2 32 22", "aria-hidden": "true" }), inner = make("g", { class: `node ${kind}` });
      inner.append(make("path", { class: "shape", d: outline(kind, 28, 18) }));
      sample.append(inner);
      legend.append(element("li", "", sample, element("span", words)));
    }
    parts.push(element("h3", "Legend"), legend);
    parts.push(element("p", "Drag to move, turn the wheel or pinch to zoom; click a node to see its inputs and its users, + and − to unfold and fold. With the keyboard: Tab to the graph, then arrow keys, Enter, Escape."));
    aside.replaceChildren(...parts);
  }
  function describe(id) {
    const group = groups.get(id), node = nodes.get(id) ?? group;
    const parts = [element("h2", node.label)], details = element("dl");
    if (group) for (const line of group.lines) parts.push(element("p", line));
    for (const [name, value] of node.details ?? []) {
      details.append(element("dt", name), element("dd", "", name === "line" || name === "called at" ? element("code", value) : value));
    }
    parts.push(details);
    if (group) {
      const button = element("button", group.open ? "Fold" : "Unfold");
      button.type = "button";
      button.addEventListener("click", () => { toggle(id); describe(id); });
      parts.push(button);
    }
    if (node.saved?.length) {
      const saved = element("ul");
      for (const each of node.saved) saved.append(element("li", each));
      parts.push(element("h3", `Saved for the backward${node.bytes ? `: ${node.bytes} that only the graph keeps` : ""}`), saved);
    }
    const [before, after] = counts(id);
    parts.push(element("h3", "Around it"), element("p", `${before.size} ancestors, ${after.size} descendants`));
    const near = way => [...new Set(members(id).flatMap(each => next[way].get(each) ?? []))].filter(each => !members(id).includes(each)).slice(0, 12);
    for (const [way, words] of [["up", "comes from"], ["down", "goes to"]]) {
      const found = near(way);
      if (found.length) parts.push(element("h3", words), list(found, each => each.lines.find(line => line.startsWith("[")) ?? ""));
    }
    aside.replaceChildren(...parts);
    aside.scrollTop = 0;
  }

  function choose(id, go = false) {
    if (id && standsFor(id) !== id && go) {
      for (const each of path(id)) groups.get(each).open = true;
      draw();
    }
    chosen = id;
    if (id) { here = standsFor(id); if (go) centre(here); }
    emphasise();
    if (id) describe(id); else about();
    const node = id && (nodes.get(id) ?? groups.get(id));
    status.textContent = node ? [node.label, ...node.lines].join(", ") : "";
  }
  function toggle(id) {
    const group = groups.get(id), before = shown.get(id);
    const corner = { x: view.x + before.left * view.k, y: view.y + before.top * view.k };
    group.open = !group.open;
    draw();
    const after = shown.get(id);
    view.x = corner.x - after.left * view.k; // keep the module in place
    view.y = corner.y - after.top * view.k;
    move();
    status.textContent = `${group.label} ${group.open ? "unfolded" : "folded"}`;
  }
  function every(open) {
    for (const group of groups.values()) group.open = open;
    draw(); fit(0.35);
  }

  const idOf = target => target.closest("[data-id]")?.dataset.id ?? null;
  const held = new Map();
  let moved = 0, pressed = null, last = null;
  svg.addEventListener("pointerdown", event => {
    held.set(event.pointerId, [event.offsetX, event.offsetY]);
    if (held.size === 1) { moved = 0; pressed = last = event.target; }
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", event => {
    const before = held.get(event.pointerId);
    if (!before) return;
    const now = [event.offsetX, event.offsetY];
    if (held.size === 2) {
      const other = [...held].find(([id]) => id !== event.pointerId)[1];
      const far = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1]) || 1;
      zoom(far(now, other) / far(before, other), other[0], other[1]);
    } else {
      view.x += now[0] - before[0];
      view.y += now[1] - before[1];
      move();
    }
    moved += Math.abs(now[0] - before[0]) + Math.abs(now[1] - before[1]);
    svg.classList.toggle("moving", moved > 5);
    held.set(event.pointerId, now);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    svg.addEventListener(name, event => {
      held.delete(event.pointerId);
      svg.classList.remove("moving");
      if (name === "pointercancel" || moved > 5 || !pressed) return;
      const id = idOf(pressed), frame = pressed.closest(".group");
      if (id && (pressed.closest(".toggle") || (frame && pressed.closest(".head")))) toggle(id);
      else if (!frame) choose(id === chosen ? null : id);
      else choose(null);
      pressed = null;
    });
  }
  svg.addEventListener("dblclick", () => { // on the whole picture, which has captured the pointer
    if (last?.closest(".node") && !last.closest(".toggle") && groups.has(idOf(last))) toggle(idOf(last));
  });
  svg.addEventListener("wheel", event => {
    event.preventDefault();
    const step = event.deltaMode ? 30 : 1;
    zoom(Math.exp(-event.deltaY * step * (event.ctrlKey ? 0.01 : 0.0015)), event.offsetX, event.offsetY);
  }, { passive: false });

  function step(key) {
    const items = [...shown.values()].filter(item => !item.open);
    if (!shown.has(here) || shown.get(here).open) return items.sort((a, b) => a.top - b.top || a.left - b.left)[0]?.id;
    const now = shown.get(here);
    if (key === "ArrowLeft" || key === "ArrowRight") {
      const ahead = items.filter(item => Math.abs(item.top + item.h / 2 - now.top - now.h / 2) < 60 && (key === "ArrowLeft" ? item.left < now.left : item.left > now.left));
      return ahead.sort((a, b) => Math.abs(a.left - now.left) - Math.abs(b.left - now.left))[0]?.id;
    }
    const along = drawn.filter(edge => key === "ArrowUp" ? edge.b === here : edge.a === here).map(edge => shown.get(key === "ArrowUp" ? edge.a : edge.b));
    return along.sort((a, b) => Math.abs(a.left + a.w / 2 - now.left - now.w / 2) - Math.abs(b.left + b.w / 2 - now.left - now.w / 2))[0]?.id;
  }
  svg.addEventListener("keydown", event => {
    if (event.key.startsWith("Arrow")) {
      const id = step(event.key);
      if (id) { here = id; emphasise(); reveal(id); status.textContent = [...shown.get(id).lines].join(", "); }
    } else if (event.key === "Enter" || event.key === " ") {
      if (groups.has(here) && chosen === here) toggle(here); else if (here) choose(here);
    } else if (event.key === "Escape") choose(null);
    else if (event.key === "+" || event.key === "=") zoom(1.25);
    else if (event.key === "-") zoom(0.8);
    else if (event.key === "0") fit();
    else if (event.key === "f" && groups.has(parent(here ?? "") ?? here)) { const id = groups.has(here) ? here : parent(here); toggle(id); here = id; emphasise(); reveal(id); }
    else return;
    event.preventDefault();
  });
  svg.addEventListener("focus", () => { if (!shown.has(here)) { here = step("ArrowDown"); emphasise(); } });

  const text = node => [node.label, ...node.lines, ...(node.details ?? []).flat(), ...(node.saved ?? [])].join(" ").toLowerCase();
  const index = [...data.groups, ...data.nodes.filter(node => node.kind !== "reference")].map(node => [node.id, text(node)]);
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) { choose(null); return; }
    const found = index.filter(([, all]) => words.every(word => all.includes(word))).map(([id]) => id);
    chosen = null; emphasise();
    const seen = new Set(found.map(standsFor));
    for (const item of shown.values()) item.at.classList.toggle("faint", !item.open && !seen.has(item.id));
    aside.replaceChildren(
      element("h2", `${found.length} found`),
      list(found.slice(0, 60), node => nodes.has(node.id) ? node.lines[0] ?? "" : "module"),
      ...(found.length > 60 ? [element("p", `and ${found.length - 60} more`)] : []));
    status.textContent = `${found.length} found`;
  });
  search.addEventListener("keydown", event => {
    if (event.key === "Enter") aside.querySelector("li button")?.click();
    if (event.key === "Escape") { search.value = ""; choose(null); }
  });
  const actions = { unfold: () => every(true), fold: () => every(false), fit: () => fit(), in: () => zoom(1.25), out: () => zoom(0.8) };
  for (const button of figure.querySelectorAll("[data-do]")) {
    if (!groups.size && ["fold", "unfold"].includes(button.dataset.do)) button.hidden = true;
    button.addEventListener("click", actions[button.dataset.do]);
  }
  const figures = [...document.querySelectorAll(".opsmith-graph")];
  figure.querySelector(".summary").textContent = data.summary;
  draw(); fit(0.6); about();
  // In a notebook the frame gets its size later: the graph is fitted again until the reader moves it.
  let moving = false;
  for (const name of ["pointerdown", "wheel", "keydown", "input"]) figure.addEventListener(name, () => { moving = true; }, { capture: true });
  new ResizeObserver(() => { if (!moving) fit(0.6); }).observe(svg.parentElement);
}
