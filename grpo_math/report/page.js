"use strict";
// The viewer: one page of rows at a time, which are clones of what page.html has made. No text becomes markup here.

const SIDES = 32;  // completions on a page of groups: four groups of eight
const [filters, rowsBox, count, previous, next] =
  ["filters", "rows", "count", "previous", "next"].map((id) => document.getElementById(id));
const control = (name) => document.querySelector(`.filters [name="${name}"]`);
const sources = [...document.querySelectorAll("template.source")].map(({ content }) => ({
  controls: content.firstElementChild,
  rows: [...content.querySelectorAll("article")].map((article) => ({
    article,
    fields: JSON.parse(article.dataset.fields),
    keys: JSON.parse(article.dataset.keys),
  })),
}));
let rows, matches, first, pageSize;

function useSource(index) {
  rows = sources[index].rows;
  const most = rows.reduce((known, { article }) => Math.max(known, article.querySelector(".sides").children.length), 1);
  pageSize = most > 2 ? Math.max(1, Math.floor(SIDES / most)) : 20;
  filters.replaceChildren(sources[index].controls.cloneNode(true));
  control("search").value = "";
  apply();
}

function haystack(row) {
  row.haystack ??= row.article.textContent.toLowerCase();
  return row.haystack;
}

function apply() {
  const chosen = [...filters.querySelectorAll("select.field")].filter((select) => select.value);
  const query = control("search").value.toLowerCase(), order = control("sort")?.value;
  matches = rows.filter((row) => chosen.every(({ name, value }) => row.fields[name]?.includes(value)) && (!query || haystack(row).includes(query)));
  if (order) {
    const sign = order[0] === "-" ? -1 : 1, key = ({ keys }) => keys[order.slice(1)];
    const last = (row) => key(row) === undefined;
    matches.sort((a, b) => last(a) - last(b) || sign * (key(a) - key(b)) || 0);
  }
  show(0);
}

function show(from) {
  first = from;
  const page = matches.slice(first, first + pageSize);
  rowsBox.replaceChildren(...page.map(({ article }) => article.cloneNode(true)));
  for (const pre of rowsBox.querySelectorAll("pre")) {
    if (pre.scrollHeight > pre.clientHeight || pre.scrollWidth > pre.clientWidth) pre.tabIndex = 0;
  }
  count.textContent = matches.length ? `${first + 1} to ${first + page.length} of ${matches.length}` : "nothing matches";
  previous.disabled = first === 0;
  next.disabled = first + pageSize >= matches.length;
}

function turn(by) {
  show(first + by * pageSize);
  rowsBox.scrollIntoView({ block: "start" });
}

function onClick({ target }) {
  if (target.matches("button.more")) {
    const text = target.previousElementSibling;
    text.querySelector("[hidden]").hidden = false;
    target.remove();
    text.tabIndex = 0;
    text.focus();
  } else if (target.dataset.change) {
    control("show").selectedIndex = 0;
    useSource(0);
    control("change").value = target.dataset.change;
    apply();
    document.getElementById("viewer").scrollIntoView();
    control("change").focus({ preventScroll: true });
  }
}

let waiting;
function onInput({ target }) {
  clearTimeout(waiting);
  if (target.name === "show") useSource(target.selectedIndex);
  else waiting = setTimeout(apply, target.name === "search" ? 120 : 0);
}

document.addEventListener("click", onClick);
if (sources.length) {
  previous.addEventListener("click", () => turn(-1));
  next.addEventListener("click", () => turn(1));
  document.querySelector(".filters").addEventListener("input", onInput);
  useSource(0);
}
