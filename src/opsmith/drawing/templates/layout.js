"use strict";
// Layered layout from top to bottom. The caller lays out each open module by itself, as one box of its parent.
const opsmithLayout = (() => {
  const GAP = { x: 18, y: 34, border: 16, pad: 14, head: 26 };
  const LONG = 4000; // largest number of waypoints; further edges get none

  // Positions nearest to the wanted ones, in this order and without overlap (pool adjacent violators).
  function spread(items, wanted, room) {
    const offsets = [];
    let sum = 0;
    items.forEach((item, at) => {
      if (at) sum += room(items[at - 1], item);
      offsets.push(sum);
    });
    const pools = [];
    items.forEach((item, at) => {
      let pool = { total: (wanted[at] - offsets[at]) * item.pull, weight: item.pull, count: 1 };
      while (pools.length && pools.at(-1).total / pools.at(-1).weight > pool.total / pool.weight) {
        const before = pools.pop();
        pool = { total: before.total + pool.total, weight: before.weight + pool.weight, count: before.count + pool.count };
      }
      pools.push(pool);
    });
    const found = [];
    for (const pool of pools) for (let k = 0; k < pool.count; k++) found.push(pool.total / pool.weight + offsets[found.length]);
    return found;
  }

  function layersOf(items, links) {
    const into = new Map(items.map(item => [item, []])), from = new Map(items.map(item => [item, []]));
    for (const [a, b] of links) { from.get(a).push(b); into.get(b).push(a); }
    const left = new Map(items.map(item => [item, into.get(item).length]));
    const order = items.filter(item => !left.get(item));
    for (let at = 0; at < order.length; at++) {
      for (const next of from.get(order[at])) {
        left.set(next, left.get(next) - 1);
        if (!left.get(next)) order.push(next);
      }
    }
    for (const item of items) if (!order.includes(item)) order.push(item); // items of a cycle, in their order
    const layer = new Map(), place = new Map(order.map((item, at) => [item, at]));
    for (const item of order) {
      const before = into.get(item).filter(each => place.get(each) < place.get(item));
      layer.set(item, before.reduce((most, each) => Math.max(most, layer.get(each) + 1), 0));
    }
    // Items without sources are placed just above their users.
    for (const item of [...order].reverse()) {
      if (into.get(item).length || item.side === "in") continue;
      const after = from.get(item).filter(each => place.get(each) > place.get(item));
      if (after.length) layer.set(item, Math.max(0, Math.min(...after.map(each => layer.get(each))) - 1));
    }
    const last = Math.max(0, ...layer.values());
    for (const item of order) if (item.side === "out") layer.set(item, last);
    return layer;
  }

  // Set x (centre) and y (top) of every item, and the waypoints of every link.
  function place(items, links) {
    const layer = layersOf(items, links.map(link => [link.a, link.b]));
    const layers = [];
    const put = (item, at) => (layers[at] ??= []).push(item);
    for (const item of items) { item.pull = 1; put(item, layer.get(item)); }
    for (let at = 0; at < layers.length; at++) layers[at] ??= [];
    const up = new Map(), down = new Map();
    const join = (a, b) => {
      (down.get(a) ?? down.set(a, []).get(a)).push(b);
      (up.get(b) ?? up.set(b, []).get(b)).push(a);
    };
    let places = 0;
    for (const link of links) {
      const [start, end] = [layer.get(link.a), layer.get(link.b)];
      link.way = [];
      if (end - start > 1 && places < LONG) {
        for (let at = start + 1; at < end; at++, places++) {
          const way = { w: 2, h: 0, way: true, pull: 3 };
          link.way.push(way);
          put(way, at);
        }
      }
      const steps = [link.a, ...link.way, link.b];
      for (let at = 1; at < steps.length; at++) join(steps[at - 1], steps[at]);
    }
    const rank = new Map();
    const number = row => row.forEach((item, at) => rank.set(item, (at + 0.5) / row.length));
    layers.forEach(number);
    const middle = (item, near) => {
      const all = (near.get(item) ?? []).map(each => rank.get(each)).sort((a, b) => a - b);
      if (!all.length) return rank.get(item);
      const half = all.length >> 1;
      return all.length % 2 ? all[half] : (all[half - 1] + all[half]) / 2;
    };
    for (let round = 0; round < 8; round++) {
      const near = round % 2 ? down : up;
      for (const row of round % 2 ? [...layers].reverse() : layers) {
        const key = new Map(row.map(item => [item, middle(item, near)]));
        row.sort((a, b) => key.get(a) - key.get(b));
        number(row);
      }
    }
    const room = (a, b) => (a.w + b.w) / 2 + (a.way && b.way ? 8 : GAP.x);
    for (const row of layers) {
      let x = 0;
      row.forEach((item, at) => { if (at) x += room(row[at - 1], item); item.x = x; });
      for (const item of row) item.x -= x / 2;
    }
    for (let round = 0; round < 10; round++) {
      const rows = round % 2 ? [...layers].reverse() : layers;
      for (const row of rows) {
        const wanted = row.map(item => {
          const near = [...((round % 2 ? down : up).get(item) ?? [])];
          if (!near.length || round > 7) near.push(...((round % 2 ? up : down).get(item) ?? []));
          return near.length ? near.reduce((sum, each) => sum + each.x, 0) / near.length : item.x;
        });
        spread(row, wanted, room).forEach((x, at) => { row[at].x = x; });
      }
    }
    let y = 0;
    for (const row of layers) {
      const height = Math.max(0, ...row.map(item => item.h));
      for (const item of row) item.y = y + (height - item.h) / 2;
      // A row of ports at the border of a module needs less room.
      y += height + (row.some(item => item.h) && layers[layers.indexOf(row) + 1]?.some(item => item.h) ? GAP.y : GAP.border);
    }
    const all = layers.flat();
    const left = Math.min(0, ...all.map(item => item.x - item.w / 2));
    const right = Math.max(0, ...all.map(item => item.x + item.w / 2));
    for (const item of all) item.x -= left;
    return { w: right - left, h: Math.max(0, y - GAP.border) };
  }

  return { place, GAP };
})();
