// What the page computes without touching the document: filtering and comparing. Tested against the Python of the same name.
"use strict";

/**
 * Tell whether a row passes. A filter has arch, op, operand, levels (a list), text and software; what is empty lets every row pass.
 * Software maps a name to how many of the versions that rows depend on its version has reached.
 */
function passes(row, filter) {
  return (
    (!filter.arch || row.arch === filter.arch) &&
    (!filter.op || row.op === filter.op) &&
    (!filter.operand || row.a === filter.operand || row.b === filter.operand) &&
    (!filter.software || row.needs.every(([name, version]) => filter.software[name] === undefined || version <= filter.software[name])) &&
    (!filter.levels || filter.levels.length === 0 || filter.levels.includes(row.level)) &&
    (!filter.text || filter.text.toLowerCase().split(/\s+/).every((word) => row.words.includes(word)))
  );
}

/** Return everything about a row that a reader may search for, in lower case. */
function searchable(row, data) {
  const sources = row.sources.map((number) => data.sources[number].join(" "));
  const keys = data.devices.filter((device) => device.arch === row.arch).map((device) => device.key);
  const own = [row.arch, row.op, row.a, row.b, row.scaling, row.path, row.accumulate, row.level, row.computes, row.evidence, row.note, row.since];
  return [...own, ...row.out, ...keys, ...sources].join(" ").toLowerCase();
}

/** Return the level of rows that supports most, null without rows. */
function bestLevel(rows, order) {
  return rows.length ? order[Math.min(...rows.map((row) => order.indexOf(row.level)))] : null;
}

/** Return one entry for each (op, a, b, accumulate) that either architecture has a row for: key, status and both sides' rows. */
function compareRows(rows, first, second, order) {
  const entries = new Map();
  for (const row of rows) {
    if (row.arch !== first && row.arch !== second) continue;
    const key = [row.op, row.a, row.b, row.accumulate];
    const id = JSON.stringify(key);
    if (!entries.has(id)) entries.set(id, { key, first: [], second: [] });
    if (row.arch === first) entries.get(id).first.push(row);
    if (row.arch === second) entries.get(id).second.push(row);
  }
  // What is absent is absent with every accumulator: rows that nothing sums in stand beside the accumulators of the other device.
  const all = [...entries.values()];
  const same = (x, y) => x.key[0] === y.key[0] && x.key[1] === y.key[1] && x.key[2] === y.key[2];
  const silent = all.filter((entry) => entry.key[3] === "none" && all.some((other) => same(other, entry) && other.key[3] !== "none"));
  for (const entry of all) {
    const spare = silent.find((other) => same(other, entry));
    if (!spare || spare === entry) continue;
    entry.first = [...entry.first, ...spare.first];
    entry.second = [...entry.second, ...spare.second];
  }
  const sorted = all.filter((entry) => !silent.includes(entry)).sort((x, y) => compareKeys(x.key, y.key));
  for (const entry of sorted) {
    if (!entry.second.length) entry.status = "only first";
    else if (!entry.first.length) entry.status = "only second";
    else entry.status = bestLevel(entry.first, order) === bestLevel(entry.second, order) ? "same level" : "level differs";
  }
  return sorted;
}

/** Order keys by their parts. */
function compareKeys(x, y) {
  for (let part = 0; part < x.length; part += 1) {
    if (x[part] !== y[part]) return x[part] < y[part] ? -1 : 1;
  }
  return 0;
}

/** Return members by the value that a function gives them, in the order of first appearance. */
function groupBy(members, value) {
  const groups = new Map();
  for (const member of members) {
    const key = value(member);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(member);
  }
  return groups;
}
