// The viewer: one page of rows at a time. Text reaches the document through textContent, value and math.js alone.

const data = JSON.parse(document.getElementById("data").textContent);
const [filters, rowsBox, count, previous, next] =
  ["filters", "rows", "count", "previous", "next"].map((id) => document.getElementById(id));
const SIDES = 32;  // completions on a page of groups: four groups of eight
const SHOWN = 4000;  // characters of a text before it has to be asked for
const TYPESET = 50000;  // characters of a text whose formulas are looked for
let PAGE = 20;  // rows
let source, chosen, query, order, matches, first;
let asWritten = false;
const texts = new WeakMap();  // what each element shows, as it was written

function write(box, text) {
  texts.set(box, text);
  box.classList.add("text");
  box.replaceChildren();
  if (asWritten || text.length > TYPESET) box.textContent = text;
  else typeset(text, box);
}

function inWords(name) {
  return Object.hasOwn(source.labels, name) ? source.labels[name] : name.replaceAll("_", " ");
}

function element(tag, text, attributes) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  return made;
}

function choice(label, names, onChoice) {
  const box = element("label", label), select = element("select", "", { name: label });
  names.forEach((name, index) => select.append(element("option", inWords(name), { value: index })));
  select.addEventListener("change", () => onChoice(select.selectedIndex));
  box.append(select);
  return box;
}

function useSource(index) {
  source = data.sources[index];
  const most = source.rows.reduce((known, row) => Math.max(known, row.sides.length), 1);
  PAGE = most > 2 ? Math.max(1, Math.floor(SIDES / most)) : 20;
  chosen = {};
  query = "";
  order = null;
  filters.replaceChildren();
  if (data.sources.length > 1) {
    filters.append(choice("show", data.sources.map((one) => one.name), (at) => { useSource(at); filters.querySelector("select").focus(); }));
    filters.querySelector("select").selectedIndex = index;
  }
  for (const { field, values } of source.filters) {
    filters.append(choice(field, ["any", ...values], (at) => { chosen[field] = at ? values[at - 1] : undefined; apply(); }));
  }
  const orders = source.sorts.flatMap((name, key) => [[name, key, 1], [name, key, -1]]);
  const names = orders.map(([name, , sign]) => `${name}, ${sign > 0 ? "lowest" : "highest"} first`);
  if (orders.length) filters.append(choice("sort", ["as in the file", ...names], (at) => { order = at ? orders[at - 1] : null; apply(); }));
  filters.append(searchBox(), writtenBox());
  apply();
}

function searchBox() {
  const box = element("label", "search", { class: "search" }), input = element("input", "", { type: "search", name: "search" });
  let waiting;
  input.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => { query = input.value.toLowerCase(); apply(); }, 120); });
  box.append(input);
  return box;
}

function writtenBox() {
  const box = element("label", "", { class: "check" }), input = element("input", "", { type: "checkbox", name: "written" });
  input.checked = asWritten;
  input.addEventListener("change", () => {
    asWritten = input.checked;
    for (const text of document.querySelectorAll(".text")) write(text, texts.get(text));
  });
  box.append(input, "formulas as they are written");
  return box;
}

function haystack(row) {
  row.haystack ??= [row.title, ...data.prompts[row.prompt], ...row.sides.flatMap((side) => [side.text, side.facts, side.note || ""])].join("\n").toLowerCase();
  return row.haystack;
}

function apply() {
  const wanted = Object.entries(chosen).filter(([, value]) => value !== undefined);
  matches = source.rows.filter((row) => wanted.every(([field, value]) => [row.fields[field]].flat().includes(value)) && (!query || haystack(row).includes(query)));
  if (order) {
    const [, key, sign] = order, last = (row) => row.keys[key] === null;
    matches.sort((a, b) => last(a) - last(b) || sign * (a.keys[key] - b.keys[key]));
  }
  show(0);
}

function show(from) {
  first = from;
  const page = matches.slice(first, first + PAGE);
  rowsBox.replaceChildren(...page.map(article));
  if (rowsBox.firstChild) rowsBox.firstChild.tabIndex = 0;
  for (const pre of rowsBox.querySelectorAll("pre")) scrollable(pre);
  count.textContent = matches.length ? `${first + 1} to ${first + page.length} of ${matches.length}` : "nothing matches";
  previous.disabled = first === 0;
  next.disabled = first + PAGE >= matches.length;
}

function scrollable(pre) {
  if (pre.scrollHeight > pre.clientHeight || pre.scrollWidth > pre.clientWidth) pre.tabIndex = 0;
}

function article(row) {
  const made = element("article", "", { tabindex: -1 }), [short, full] = data.prompts[row.prompt];
  made.append(element("h3", row.title), ...shortened("p", short));
  if (full) {
    const more = element("details");
    more.append(element("summary", "whole prompt"), ...shortened("pre", full));
    made.append(more);
  }
  const sides = element("div", "", { class: "sides" });
  for (const side of row.sides) {
    const box = element("div"), head = element("h4", side.label);
    if (side.badge) head.append(element("span", inWords(side.badge), { class: "badge", "data-badge": side.badge }));
    box.append(head, element("small", side.facts));
    if (side.note) box.append(element("p", side.note, { class: "why" }));
    for (const [kind, text] of side.turns || [["", side.text || "(empty)"]]) {
      if (kind) box.append(element("small", kind, { class: "turn" }));
      const program = kind && kind !== "said";  // no formulas in it
      box.append(...(program ? [element("pre", text, { class: kind.split(",")[0] })] : shortened("pre", text)));
    }
    sides.append(box);
  }
  made.append(sides);
  return made;
}

// An element with the text, and a button that shows all of it where it is long.
function shortened(tag, text) {
  const box = element(tag, "", { dir: "auto" });
  write(box, text.slice(0, SHOWN));
  if (text.length <= SHOWN) return [box];
  const button = element("button", `Show all ${text.length.toLocaleString("en")} characters`, { type: "button" });
  button.addEventListener("click", () => { write(box, text); button.remove(); box.tabIndex = 0; box.focus(); });
  return [box, button];
}

function turn(by) {
  show(first + by * PAGE);
  rowsBox.scrollIntoView({ block: "start" });
}

// From the row that has the focus to the next or the one before, over the ends of a page.
function step(by) {
  const rows = [...rowsBox.children], at = rows.indexOf(document.activeElement.closest("article"));
  let row = rows[at < 0 ? 0 : at + by];
  if (at >= 0 && !row && !(by > 0 ? next : previous).disabled) {
    turn(by);
    row = by > 0 ? rowsBox.firstChild : rowsBox.lastChild;
  }
  if (!row) return;
  for (const other of rowsBox.children) other.tabIndex = other === row ? 0 : -1;
  row.focus({ preventScroll: true });
  row.scrollIntoView({ block: "start" });
}

const STEPS = { j: 1, k: -1, ArrowDown: 1, ArrowUp: -1 };

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  if (event.key === "/") filters.querySelector("input[type=search]").focus();
  else if (event.key.length === 1 && Object.hasOwn(STEPS, event.key)) step(STEPS[event.key]);
  // Elsewhere the arrow keys scroll.
  else if (Object.hasOwn(STEPS, event.key) && event.target.matches("article")) step(STEPS[event.key]);
  else return;
  event.preventDefault();
}

for (const text of document.querySelectorAll(".text")) write(text, text.textContent);
if (data.sources.length) {
  for (const id of ["pager", "keys"]) document.getElementById(id).hidden = false;
  previous.addEventListener("click", () => turn(-1));
  next.addEventListener("click", () => turn(1));
  document.addEventListener("keydown", onKey);
  for (const button of document.querySelectorAll("button[data-change]")) {
    button.addEventListener("click", () => {
      useSource(0);
      const select = filters.querySelector("select[name=change]");
      select.selectedIndex = 1 + source.filters.find((filter) => filter.field === "change").values.indexOf(button.dataset.change);
      select.dispatchEvent(new Event("change"));
      document.getElementById("viewer").scrollIntoView();
      select.focus({ preventScroll: true });
    });
  }
  useSource(0);
} else {
  rowsBox.textContent = "This run holds no completions.";
}
