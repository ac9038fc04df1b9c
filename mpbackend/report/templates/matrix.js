(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const devices = new Map(data.devices.map((device) => [device.key, device]));
  for (const row of data.rows) row.words = searchable(row, data);
  const state = { view: "browse", device: "", first: "", second: "", op: "", operand: "", text: "", levels: [], statuses: [], software: {} };
  const views = ["browse", "compare", "grid"].filter((view) => byId(`view-${view}`));
  const fields = ["device", "first", "second", "op", "operand", "text"];
  const STATUS_SYMBOL = { "level differs": "≠", "only first": "◂", "only second": "▸", "same level": "=" };
  let identity = 0;

  /** Make an element; strings among the children become text. */
  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null && child !== ""));
    return element;
  }

  /** Return a name in code that may break after an underscore or a dot. */
  function soft(text, meaning) {
    const parts = text.split(/(?<=[_.,])/).flatMap((part, index) => (index ? [document.createElement("wbr"), part] : [part]));
    return make("span", { class: "code", title: meaning || null }, ...parts);
  }

  function badge(level) {
    const [symbol, meaning] = data.levels[level];
    return make("span", { class: `badge ${level}`, title: meaning }, make("span", { "aria-hidden": "true" }, symbol), ` ${level}`);
  }

  function sourceItem(number) {
    const [title, location, date] = data.sources[number];
    const place = location.startsWith("https://") ? make("a", { href: location, rel: "noreferrer" }, location) : location;
    return make("li", {}, make("b", {}, title), make("span", { class: "where" }, place), date ? make("span", { class: "date" }, date) : null);
  }

  /** Return a button with what is known besides; the text is in the document, so that a screen reader has it without the pointer. */
  function details(row) {
    const id = `details-${(identity += 1)}`;
    const many = row.sources.length === 1 ? "1 source" : `${row.sources.length} sources`;
    const more = make("div", { id, class: "more", hidden: true });
    if (row.conflict.length) {
      more.append(make("h3", {}, "Sources disagree"), make("ul", {}, ...row.conflict.map(([claim, number]) => make("li", {}, claim, make("ul", {}, sourceItem(number))))));
    }
    const facts = [
      ["note", row.note],
      ["evidence", data.evidence[row.evidence]],
      ["sizes", row.align],
      ["since", row.since],
      ["path", data.paths[row.path] || ""],
      ["scaling", row.scaling === "none" ? "" : data.scaling[row.scaling] || ""],
    ].filter(([, value]) => value);
    more.append(make("dl", {}, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))));
    more.append(make("h3", {}, "Sources"), make("ol", {}, ...row.sources.map(sourceItem)));
    const label = `${many}${row.note ? ", note" : ""}`;
    const button = make("button", { type: "button", class: "cite", "aria-expanded": "false", "aria-controls": id, "aria-describedby": id }, label);
    return make("span", { class: "details" }, button, more);
  }

  function operands(a, b) {
    return a === b ? make("code", {}, a) : make("span", {}, make("code", {}, a), " × ", make("code", {}, b));
  }

  function tag(text, meaning) {
    const label = soft(text, meaning);
    label.classList.add("tag");
    return label;
  }

  function cell(label, ...children) {
    return make("td", { role: "cell", "data-label": label }, ...children);
  }

  function table(caption, heads, rows) {
    const head = make("tr", { role: "row" }, ...heads.map((name) => make("th", { scope: "col", role: "columnheader" }, name)));
    return make(
      "table",
      { role: "table" },
      make("caption", {}, caption),
      make("thead", { role: "rowgroup" }, head),
      make("tbody", { role: "rowgroup" }, ...rows),
    );
  }

  /** Rows of the browsing view are made once and then only hidden. */
  const browsing = [];
  function browseTable() {
    for (const row of data.rows) {
      const level = cell("Level", badge(row.level), row.computes ? make("span", { class: "sub" }, "computes ", make("code", {}, row.computes)) : null);
      if (row.conflict.length) level.append(make("span", { class: "sub warn" }, "⚠ sources disagree"));
      const element = make(
        "tr",
        { role: "row" },
        cell("Architecture", make("code", { title: data.archs[row.arch] }, row.arch)),
        cell("Operation", soft(row.op, data.ops[row.op])),
        cell("Operands", operands(row.a, row.b), row.scaling === "none" ? null : tag(row.scaling, data.scaling[row.scaling])),
        cell("Accumulate", make("span", { class: "code" }, row.sum)),
        cell("Results", soft(row.out.join(", ") || "–")),
        cell("Path", soft(row.path, data.paths[row.path])),
        level,
        cell("Sources", details(row)),
      );
      browsing.push([row, element]);
    }
    const heads = ["Architecture", "Operation", "Operands", "Accumulate", "Results", "Path", "Level", "Sources"];
    return table("Rows of the capability matrix", heads, browsing.map(([, element]) => element));
  }
  let browsed = null;

  function showBrowse() {
    browsed = browsed || browseTable();
    const filter = { ...state, arch: state.device ? devices.get(state.device).arch : "" };
    let shown = 0;
    const perLevel = Object.fromEntries(data.order.map((level) => [level, 0]));
    for (const [row, element] of browsing) {
      const rest = passes(row, { ...filter, levels: [] });
      const pass = rest && (!state.levels.length || state.levels.includes(row.level));
      if (rest) perLevel[row.level] += 1;
      element.hidden = !pass;
      shown += pass ? 1 : 0;
    }
    for (const chip of byId("levels").children) {
      chip.setAttribute("aria-pressed", String(state.levels.includes(chip.dataset.level)));
      chip.querySelector(".count").textContent = perLevel[chip.dataset.level];
    }
    byId("cards").replaceChildren(...(state.device ? [card(devices.get(state.device))] : []));
    byId("results").replaceChildren(shown ? browsed : empty());
    byId("count").textContent = `${shown} of ${data.rows.length} rows`;
  }

  function side(device, rows) {
    if (!rows.length) return cell(device, make("span", { class: "none" }, "– no row"));
    const best = [...rows].sort((x, y) => data.order.indexOf(x.level) - data.order.indexOf(y.level));
    const groups = [...groupBy(best, (row) => row.level)].map(([level, members]) =>
      make("li", {}, badge(level), make("ul", { class: "paths" }, ...members.map(pathItem))),
    );
    return cell(device, make("ul", { class: "side" }, ...groups));
  }

  function pathItem(row) {
    const computes = row.computes ? make("span", { class: "sub" }, "computes ", make("code", {}, row.computes)) : null;
    const scaling = row.scaling === "none" ? null : tag(row.scaling, data.scaling[row.scaling]);
    return make("li", {}, soft(row.path, data.paths[row.path]), " ", scaling, computes, details(row));
  }

  const statusText = (status) => ({ "only first": `only ${state.first}`, "only second": `only ${state.second}` })[status] || status;

  function showCompare() {
    const [first, second] = [devices.get(state.first), devices.get(state.second)];
    const filter = { op: state.op, operand: state.operand, text: state.text, levels: [], software: state.software };
    const entries = compareRows(data.rows.filter((row) => passes(row, filter)), first.arch, second.arch, data.order);
    const shown = entries.filter((entry) => !state.statuses.length || state.statuses.includes(entry.status));
    const rows = shown.map((entry) => {
      const [op, a, b, accumulate] = entry.key;
      return make(
        "tr",
        { role: "row", class: entry.status.replace(" ", "-") },
        cell("Operation", soft(op, data.ops[op])),
        cell("Operands", operands(a, b)),
        cell("Accumulate", make("span", { class: "code" }, accumulate)),
        cell("Status", make("span", { class: "status" }, make("span", { "aria-hidden": "true" }, STATUS_SYMBOL[entry.status]), ` ${statusText(entry.status)}`)),
        side(first.key, entry.first),
        side(second.key, entry.second),
      );
    });
    byId("statuses").replaceChildren(
      ...data.statuses.map((status) => {
        const count = entries.filter((entry) => entry.status === status).length;
        const pressed = String(state.statuses.includes(status));
        const symbol = make("span", { "aria-hidden": "true" }, STATUS_SYMBOL[status]);
        return make("button", { type: "button", class: "chip", "data-status": status, "aria-pressed": pressed }, symbol, ` ${statusText(status)} `, make("span", { class: "count" }, String(count)));
      }),
    );
    const heads = ["Operation", "Operands", "Accumulate", "Status", first.key, second.key];
    byId("cards").replaceChildren(card(first), card(second));
    byId("results").replaceChildren(rows.length ? table(`${first.key} and ${second.key}`, heads, rows) : empty());
    byId("count").textContent = `${shown.length} of ${entries.length} combinations of operation, operands and accumulator`;
  }

  /** Recipes on devices: one line a device, one column a recipe. */
  function showGrid() {
    const keys = Object.keys(data.grid.devices).filter((key) => !state.device || key === state.device);
    const rows = keys.map((key) =>
      make(
        "tr",
        { role: "row" },
        cell("Device", make("code", { title: devices.get(key).name }, key)),
        ...data.grid.devices[key].map(([level, granted, why], index) => gridCell(data.grid.recipes[index], level, granted, why)),
      ),
    );
    byId("cards").replaceChildren(...(state.device ? [card(devices.get(state.device))] : []));
    const frame = make("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Recipes on devices" });
    frame.append(table("Recipes on devices", ["Device", ...data.grid.recipes], rows));
    byId("results").replaceChildren(rows.length ? frame : empty());
    byId("count").textContent = `${keys.length} of ${Object.keys(data.grid.devices).length} devices, ${data.grid.recipes.length} recipes`;
  }

  /** Return what a recipe becomes on a device: level and formats, and the reasons behind a button. */
  function gridCell(recipe, level, granted, why) {
    const parts = [badge(level), " ", make("span", { class: "code" }, granted || "refused")];
    if (why.length) {
      const id = `details-${(identity += 1)}`;
      const more = make("div", { id, class: "more", hidden: true }, make("h3", {}, granted ? "Warned" : "Refused"));
      more.append(make("ul", {}, ...why.map((number) => make("li", {}, data.grid.sentences[number]))));
      const label = granted ? "warned" : "why";
      parts.push(" ", make("span", { class: "details" }, make("button", { type: "button", class: "cite", "aria-expanded": "false", "aria-controls": id, "aria-describedby": id }, label), more));
    }
    return cell(recipe, make("span", {}, ...parts));
  }

  function card(device) {
    const peaks = device.peaks.map((peak) => {
      const more = [peak.variant, peak.unit === "vector" ? "vector unit" : "", peak.basis].filter(Boolean).join(", ");
      return make("li", {}, make("code", {}, `${peak.format} → ${peak.accumulate}`), ` ${peak.rate} `, make("span", { class: "sub-inline" }, more));
    });
    const list = peaks.length
      ? make("details", { class: "peaks", open: peaks.length <= 12 && window.innerWidth > 960 }, make("summary", {}, `${peaks.length} dense peaks, 10¹² operations a second`), make("ul", {}, ...peaks))
      : make("p", { class: "sub" }, "no dense peak is known");
    return make(
      "article",
      { class: "card" },
      make("h2", {}, make("code", {}, device.key)),
      make("p", {}, device.name),
      make("p", { class: "sub" }, "architecture ", make("code", {}, device.arch), ` · memory ${device.memory}`),
      list,
    );
  }

  function empty() {
    return make("p", { class: "empty" }, "No row passes these filters. A combination without a row is unknown, not absent.");
  }

  function show() {
    close();
    for (const view of views) byId(`view-${view}`).setAttribute("aria-pressed", String(view === state.view));
    for (const element of document.querySelectorAll(".browse, .compare, .grid")) element.hidden = !element.classList.contains(state.view);
    for (const field of fields) byId(field).value = state[field];
    for (const select of byId("software").querySelectorAll("select")) select.value = state.software[select.dataset.name] ?? "";
    ({ browse: showBrowse, compare: showCompare, grid: showGrid })[state.view]();
    save();
  }

  // The state is kept in the address, so that a view can be shared.
  function save() {
    const words = new URLSearchParams();
    if (state.view === "compare") words.set("compare", `${state.first},${state.second}`);
    else if (state.device) words.set("device", state.device);
    if (state.view === "grid") words.set("view", "grid");
    for (const [name, version] of Object.entries(state.software)) words.append("software", `${name}:${version}`);
    for (const field of ["op", "operand", "text"]) if (state[field]) words.set(field, state[field]);
    if (state.levels.length && state.view === "browse") words.set("levels", state.levels.join(","));
    const hash = words.toString();
    if (hash !== location.hash.slice(1)) history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
  }

  function restore() {
    const words = new URLSearchParams(location.hash.slice(1));
    const pair = words.has("compare") ? words.get("compare").split(",") : data.compare;
    if (pair && pair.length === 2 && pair.every((key) => devices.has(key))) [state.view, state.first, state.second] = ["compare", ...pair];
    if (words.has("device") && devices.has(words.get("device"))) [state.view, state.device] = ["browse", words.get("device")];
    if (words.get("view") === "grid" && views.includes("grid")) state.view = "grid";
    state.software = {};
    for (const [name, version] of words.getAll("software").map((word) => word.split(":"))) {
      if (Object.hasOwn(data.software, name) && /^\d+$/.test(version) && version <= data.software[name].length) state.software[name] = Number(version);
    }
    for (const field of ["op", "operand"]) {
      if ([...byId(field).options].some((option) => option.value === words.get(field))) state[field] = words.get(field);
    }
    state.text = words.get("text") || "";
    state.levels = (words.get("levels") || "").split(",").filter((level) => data.order.includes(level));
  }

  // Details open on hover, on focus and on a click; Escape closes them and leaves the focus where it is.
  let opened = null;
  let pinned = false;
  let timer = 0;
  function open(wrapper) {
    clearTimeout(timer);
    if (opened === wrapper) return;
    close();
    opened = wrapper;
    const more = wrapper.querySelector(".more");
    const button = wrapper.querySelector(".cite");
    more.hidden = false;
    button.setAttribute("aria-expanded", "true");
    const place = button.getBoundingClientRect();
    const width = Math.min(540, document.documentElement.clientWidth - 16);
    more.style.width = `${width}px`;
    more.style.left = `${window.scrollX + Math.max(8, Math.min(place.right - width, document.documentElement.clientWidth - width - 8))}px`;
    const below = place.bottom + more.offsetHeight + 8 < window.innerHeight || place.top < more.offsetHeight + 8;
    more.style.top = `${window.scrollY + (below ? place.bottom + 2 : place.top - more.offsetHeight - 2)}px`;
  }
  function close() {
    clearTimeout(timer);
    if (!opened) return;
    opened.querySelector(".more").hidden = true;
    opened.querySelector(".cite").setAttribute("aria-expanded", "false");
    opened = null;
    pinned = false;
  }
  const wrapperOf = (target) => (target instanceof Element ? target.closest(".details") : null);

  function listen() {
    const results = byId("results");
    results.addEventListener("pointerover", (event) => {
      const wrapper = event.pointerType === "mouse" ? wrapperOf(event.target) : null;
      if (!wrapper || pinned) return;
      clearTimeout(timer);
      if (wrapper !== opened) timer = setTimeout(() => open(wrapper), 90);
    });
    results.addEventListener("pointerout", (event) => {
      const wrapper = wrapperOf(event.target);
      if (!wrapper || pinned || wrapper === wrapperOf(event.relatedTarget)) return;
      clearTimeout(timer);
      if (!wrapper.contains(document.activeElement)) timer = setTimeout(close, 160);
    });
    results.addEventListener("focusin", (event) => {
      const wrapper = wrapperOf(event.target);
      if (wrapper) open(wrapper);
    });
    results.addEventListener("focusout", (event) => {
      if (opened && !opened.contains(event.relatedTarget)) close();
    });
    results.addEventListener("click", (event) => {
      const button = event.target.closest(".cite");
      if (!button) return;
      const wrapper = wrapperOf(button);
      if (opened === wrapper && pinned) return close();
      open(wrapper);
      pinned = true;
    });
    results.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step || !event.target.matches(".cite")) return;
      const buttons = [...results.querySelectorAll("tr:not([hidden]) .cite")];
      const next = buttons[buttons.indexOf(event.target) + step];
      if (next) {
        event.preventDefault();
        next.focus();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
    });
    document.addEventListener("pointerdown", (event) => {
      if (opened && wrapperOf(event.target) !== opened) close();
    });
    const form = byId("filters");
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", (event) => {
      const { name } = event.target.dataset;
      if (name === undefined) state[event.target.id] = event.target.value;
      else if (event.target.value === "") delete state.software[name];
      else state.software[name] = Number(event.target.value);
      show();
    });
    form.addEventListener("reset", (event) => {
      event.preventDefault();
      Object.assign(state, { device: "", op: "", operand: "", text: "", levels: [], statuses: [], software: {} });
      show();
    });
    const toggle = (list, value) => (list.includes(value) ? list.filter((member) => member !== value) : [...list, value]);
    byId("levels").addEventListener("click", (event) => {
      const chip = event.target.closest(".chip");
      if (chip) {
        state.levels = toggle(state.levels, chip.dataset.level);
        show();
      }
    });
    byId("statuses").addEventListener("click", (event) => {
      const chip = event.target.closest(".chip");
      if (chip) {
        state.statuses = toggle(state.statuses, chip.dataset.status);
        show();
        byId("statuses").querySelector(`[data-status="${chip.dataset.status}"]`).focus();
      }
    });
    for (const view of views) {
      byId(`view-${view}`).addEventListener("click", () => {
        state.view = view;
        show();
      });
    }
    window.addEventListener("hashchange", () => {
      restore();
      show();
    });
  }

  function fill() {
    const option = (value, text) => make("option", { value }, text || value);
    for (const id of ["device", "first", "second"]) {
      for (const [family, members] of groupBy(data.devices, (device) => device.family)) {
        byId(id).append(make("optgroup", { label: family }, ...members.map((device) => option(device.key))));
      }
    }
    byId("op").append(...[...new Set(data.rows.map((row) => row.op))].sort().map((op) => option(op)));
    byId("operand").append(...[...new Set(data.rows.flatMap((row) => [row.a, row.b]))].sort().map((name) => option(name)));
    for (const [name, versions] of Object.entries(data.software)) {
      const reached = (count) => (count < versions.length ? `before ${versions[count]}` : `${versions[count - 1]} or later`);
      const from = (count) => (count && count < versions.length ? `${versions[count - 1]}, before ${versions[count]}` : reached(count));
      const options = [...versions, ""].map((_, count) => option(String(count), from(count)));
      byId("software").append(make("label", {}, `${name} `, make("select", { "data-name": name }, option("", "any version"), ...options)));
    }
    const keys = data.compare || [data.devices[0], data.devices[data.devices.length - 1]].map((device) => device && device.key);
    [state.first, state.second] = keys;
  }

  if (!data.devices.length) {
    byId("results").replaceChildren(empty());
    return;
  }
  fill();
  restore();
  listen();
  show();
})();
