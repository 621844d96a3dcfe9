"use strict";
(() => {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const the = (id) => document.getElementById(id);
  const VERDICTS = {
    "FITS": { word: "Fits", mark: "✓", style: "good" },
    "UNCERTAIN": { word: "Uncertain", mark: "?", style: "unsure" },
    "DOES NOT FIT": { word: "Does not fit", mark: "✕", style: "bad" },
  };
  // Colors that people with color vision deficiencies can tell apart (Okabe and Ito), in the order of the bar.
  const COLORS = {
    "parameters": "#0072B2", "gathered parameters": "#56B4E9", "gradients": "#009E73",
    "optimizer state": "#CC79A7", "activations": "#E69F00", "logits and loss": "#D55E00",
  };
  const MORE_COLORS = ["#F0E442", "#8C7AE6", "#A6761D", "#1B9E9E", "#888888"];
  const RETRIES =
    "It runs only if the allocator returns memory in the middle of a step and requests it again, which takes time.";
  const DIMENSIONS = ["length", "ranks", "checkpointing"];
  const PHASES = { "forward": "forward pass", "backward": "backward pass", "optimizer step": "optimizer" };

  const number = (value) => Math.round(value).toLocaleString("en-US");
  const significant = (value) =>
    (Math.abs(value) >= 100 ? Math.round(value) : Number(value.toPrecision(3))).toString();
  function bytes(size) {
    const units = ["B", "KiB", "MiB", "GiB"];
    let at = 0;
    while (at < units.length - 1 && Math.abs(size) >= 1024 ** (at + 1)) at += 1;
    return `${significant(size / 1024 ** at)} ${units[at]}`;
  }
  const duration = (seconds) =>
    seconds >= 1 ? `${significant(seconds)} s` : `${significant(seconds * 1e3)} ms`;
  const percent = (share) => `${significant(100 * share)}%`;
  const counted = (count, what) => `${number(count)} ${what}${count === 1 ? "" : "s"}`;

  // What is chosen: places in the lists of rows, devices and choices.
  const state = {
    rows: facts.rows.indexOf(facts.asked.rows), device: facts.asked.device, choice: facts.asked.choice,
  };
  const choice = () => facts.choices[state.choice];

  function answer(rows = state.rows) {
    const device = choice().devices[state.device];
    const peaks = choice().peaks[device.peaks];
    const reserved = peaks.reserved[rows];
    const parts = Object.entries(peaks.parts).map(([name, sizes]) => [name, sizes[rows]]);
    return {
      device, reserved, parts: parts.filter(([, size]) => size > 0), phase: peaks.phases[rows],
      verdict: device.verdicts[rows], retries: device.retries[rows], speed: device.speeds[rows],
    };
  }

  const names = [...new Set(facts.choices.flatMap((one) => one.peaks.flatMap((peaks) => Object.keys(peaks.parts))))];
  const order = [...Object.keys(COLORS).filter((name) => names.includes(name)),
    ...names.filter((name) => !(name in COLORS)).sort()];
  const others = order.filter((name) => !(name in COLORS));
  const colorOf = (name) => COLORS[name] ?? MORE_COLORS[others.indexOf(name) % MORE_COLORS.length];

  function element(tag, text = "", properties = {}) {
    const made = Object.assign(document.createElement(tag), properties);
    if (text) made.textContent = text;
    return made;
  }
  function exact(value, text) {  // the number itself for programs, a rounded one for people
    return element("data", text, { value: String(value) });
  }

  function showVerdict(now) {
    const { word, mark, style } = VERDICTS[now.verdict];
    the("verdict").className = style;
    the("verdict").dataset.verdict = now.verdict;
    the("word").textContent = word;
    the("mark").textContent = mark;
    const [below, above] = now.device.band.map((share) => `${significant(100 * share)}%`);
    const margin = below === above ? `±${below}` : `−${below} to +${above}`;
    const cards = choice().ranks === 1 ? "the" : "each";
    the("summary").replaceChildren(
      exact(now.reserved, bytes(now.reserved)), ` (${margin}) of `,
      exact(now.device.usable, bytes(now.device.usable)),
      ` usable on ${cards} ${facts.devices[state.device].name}.` +
      (now.verdict === "UNCERTAIN" ? ` ${now.retries ? RETRIES : "Only a trial on the device can tell."}` : ""));
  }

  function showBar(now) {
    const most = now.reserved * (1 + now.device.band[1]);
    const scale = Math.max(1.2 * now.device.usable, 1.02 * most);
    const width = (size) => `${(100 * size) / scale}%`;
    const sizes = Object.fromEntries(now.parts);
    const held = now.reserved - now.parts.reduce((sum, [, size]) => sum + size, 0);
    const segments = order.filter((name) => sizes[name]).map((name) => {
      const one = element("div", "", { title: `${name}: ${bytes(sizes[name])}` });
      Object.assign(one.style, { width: width(sizes[name]), background: colorOf(name) });
      return one;
    });
    if (held > 0) {
      const rest = element("div", "", { className: "rest", title: `held, not in tensors: ${bytes(held)}` });
      rest.style.width = width(held);
      segments.push(rest);
    }
    the("stack").replaceChildren(...segments);
    const least = now.reserved * (1 - now.device.band[0]);
    Object.assign(the("error").style, { left: width(least), width: width(most - least) });
    the("limit").style.left = width(now.device.usable);
    the("capacity").textContent = `${bytes(now.device.usable)} usable`;
    const listed = now.parts.map(([name, size]) => `${name} ${bytes(size)}`).join(", ");
    the("bar").setAttribute("aria-label",
      `${bytes(now.reserved)} of ${bytes(now.device.usable)} usable: ${listed}`);
  }

  function showParts(now) {
    const row = (name, size, className, swatch) => {
      const line = element("tr", "", { className });
      const head = element("th", "", { scope: "row" });
      if (swatch) head.append(swatch);
      head.append(name);
      const cell = element("td");
      cell.append(exact(size, bytes(size)));
      line.append(head, cell);
      return line;
    };
    const sizes = Object.fromEntries(now.parts);
    const lines = order.filter((name) => sizes[name]).map((name) => {
      const swatch = element("span", "", { className: "swatch" });
      swatch.style.background = colorOf(name);
      return row(name, sizes[name], "", swatch);
    });
    const held = now.reserved - now.parts.reduce((sum, [, size]) => sum + size, 0);
    if (held > 0) {
      lines.push(row("held by the allocator, not in tensors", held, "",
        element("span", "", { className: "swatch rest" })));
    }
    the("parts").replaceChildren(...lines, row("held by the allocator, in all", now.reserved, "sum"));
    the("phase").textContent = now.phase ? `Reached in: ${PHASES[now.phase] ?? now.phase}.` : "";
  }

  function showSpeed(now) {
    const speed = now.verdict === "DOES NOT FIT" ? null : now.speed;
    the("no-speed").hidden = speed !== null;
    the("no-speed").textContent =
      now.verdict === "DOES NOT FIT" ? "None, because it does not fit." : "Nothing is known about it.";
    the("speed").hidden = speed === null;
    if (speed === null) return;
    const [low, high] = speed.band.map((share) => number(speed.tokens * (1 + share)));
    const lines = [
      ["tokens/s for each GPU", exact(speed.tokens, number(speed.tokens)), "tokens"],
      ["may be", `${low} to ${high}`],
      ["tokens/s in all", number(speed.tokens * choice().ranks)],
      ["a step takes", exact(speed.seconds, duration(speed.seconds))],
      ["utilization (MFU)", exact(speed.mfu, percent(speed.mfu))],
    ];
    the("speed").replaceChildren(...lines.flatMap(([name, value]) => {
      const shown = element("dd");
      shown.append(value);
      return [element("dt", name), shown];
    }));
  }

  function showSizes() {
    const usable = choice().devices[state.device].usable;
    const height = (size) => `${Math.min(100, (80 * size) / usable)}%`;
    const columns = facts.rows.map((rows, at) => {
      const { reserved, verdict } = answer(at);
      const column = element("div", "", { title: `${counted(rows, "row")}: ${bytes(reserved)}` });
      column.className = `${VERDICTS[verdict].style}${at === state.rows ? " now" : ""}`;
      const filled = element("i");
      filled.style.height = height(reserved);
      column.append(filled);
      column.addEventListener("click", () => { state.rows = at; show(); });
      return column;
    });
    const line = element("b");
    line.style.bottom = height(usable);
    the("sizes").replaceChildren(...columns, line);
  }

  function showControls(now) {
    const rows = facts.rows[state.rows];
    the("rows").value = state.rows;
    the("rows").setAttribute("aria-valuetext", `${counted(rows, "row")}: ${VERDICTS[now.verdict].word}`);
    the("rows-shown").textContent = number(rows);
    const most = now.device.largest;
    the("largest").replaceChildren(
      ...(most ? ["Largest that fits: ", exact(most, number(most))] : ["Not even one row fits."]));
    the("device").value = state.device;
    for (const dimension of DIMENSIONS) {
      for (const input of the(dimension).querySelectorAll("input")) {
        input.checked = input.value === String(choice()[dimension]);
      }
    }
  }

  function command() {
    const words = [facts.command, facts.devices[state.device].words, `--nproc ${choice().ranks}`,
      `--seq-len ${choice().length}`, `${facts.rows_key}=${facts.rows[state.rows]}`, choice().overrides];
    return words.filter((word) => word).join(" ");
  }

  function show() {
    const now = answer();
    showVerdict(now);
    showBar(now);
    showControls(now);
    showSizes();
    showParts(now);
    showSpeed(now);
    the("command").textContent = command();
    remember();
  }

  // The address has what is chosen, so that it can be sent.
  function remember() {
    const chosen = { rows: facts.rows[state.rows], gpu: facts.devices[state.device].name };
    for (const dimension of DIMENSIONS) chosen[dimension] = choice()[dimension];
    try {
      history.replaceState(null, "", `#${new URLSearchParams(chosen)}`);
    } catch { /* not every viewer of files has an address */ }
  }
  function recall() {
    const chosen = new URLSearchParams(location.hash.slice(1));
    const rows = facts.rows.indexOf(Number(chosen.get("rows")));
    const device = facts.devices.findIndex((one) => one.name === chosen.get("gpu"));
    const at = facts.choices.findIndex(
      (one) => DIMENSIONS.every((dimension) => String(one[dimension]) === chosen.get(dimension)));
    if (rows >= 0) state.rows = rows;
    if (device >= 0) state.device = device;
    if (at >= 0) state.choice = at;
  }

  // Another value of one thing, the others as they are; where that was not asked, as they were asked.
  function choose(dimension, value) {
    const has = (one, of) => DIMENSIONS.every(
      (each) => String(one[each]) === (each === dimension ? value : String(of[each])));
    const before = choice();
    const asked = facts.choices[facts.asked.choice];
    let at = facts.choices.findIndex((one) => has(one, before));
    if (at < 0) at = facts.choices.findIndex((one) => has(one, asked));
    state.choice = at;
    const back = DIMENSIONS.filter((each) => each !== dimension && before[each] !== choice()[each]);
    const shown = {
      length: (one) => `rows of ${number(one.length)} tokens`, ranks: (one) => counted(one.ranks, "GPU"),
      checkpointing: (one) => `checkpointing ${one.checkpointing}`,
    };
    const said = back.map((each) => shown[each](choice())).join(" and ");
    the("notice").textContent = said ? `Back to ${said}: the two were not changed together.` : "";
    show();
  }

  function fill() {
    the("rows-key").textContent = `(${facts.rows_key})`;
    the("rows").max = facts.rows.length - 1;
    the("rows").style.setProperty("--n", facts.rows.length);
    the("rows").addEventListener("input", () => { state.rows = Number(the("rows").value); show(); });
    for (const [at, device] of facts.devices.entries()) {
      the("device").append(element("option", device.name, { value: String(at) }));
    }
    the("device").addEventListener("change", () => { state.device = Number(the("device").value); show(); });
    for (const dimension of DIMENSIONS) {
      const values = [...new Set(facts.choices.map((one) => one[dimension]))];
      if (dimension !== "checkpointing") values.sort((a, b) => a - b);
      for (const value of values) {
        const label = element("label");
        const input = element("input", "", { type: "radio", name: dimension, value: String(value) });
        input.addEventListener("change", () => choose(dimension, input.value));
        const text = typeof value === "number" ? number(value) : value;
        label.append(input, element("span", text));
        the(dimension).querySelector(".options").append(label);
      }
    }
    const listed = (id, lines) => the(id).append(...lines.map((line) => element("li", line)));
    listed("assumptions", facts.assumptions);
    listed("missing", facts.missing);
    the("missing-box").hidden = !facts.missing.length;
    the("accumulation").textContent = `${counted(facts.accumulation, "micro-batch").replace("batchs", "batches")} in a step`;
    the("version").textContent = facts.version;
    the("copy").addEventListener("click", copy);
  }

  async function copy() {
    try {
      await navigator.clipboard.writeText(the("command").textContent);
      the("copy").textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(the("command"));
      the("copy").textContent = "Selected";
    }
    setTimeout(() => { the("copy").textContent = "Copy"; }, 2000);
  }

  recall();
  fill();
  show();
  the("page").hidden = false;
  addEventListener("hashchange", () => { recall(); show(); });
})();
