
// Keeps the page current: asks what has changed, and puts it into its place without disturbing the rest.
const EVERY = 1000; // milliseconds between two questions while the page is visible
let seen = data.live.seen, ahead = data.live.now - Date.now() / 1000; // the server's clock before ours, in seconds
const lost = make("p", { class: "lost", role: "status", "aria-live": "polite" }, document.body);

function age(seconds) {
  for (const [limit, size, unit] of [[120, 1, "s"], [7200, 60, "min"], [172800, 3600, "h"]]) if (seconds < limit) return `${Math.max(0, Math.round(seconds / size))} ${unit} ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}
function ages() {
  const now = Date.now() / 1000 + ahead;
  for (const time of document.querySelectorAll("time[data-at]")) {
    const text = age(now - time.dataset.at);
    if (time.textContent !== text) time.textContent = text;
  }
}

// Make the tree `old` equal to `now`, and leave alone what is equal: focus, selection, tooltips, open details.
function morph(old, now) {
  if (old.nodeType !== now.nodeType || old.nodeName !== now.nodeName) return void old.replaceWith(now);
  if (old.nodeType !== Node.ELEMENT_NODE) { if (old.data !== now.data) old.data = now.data; return; }
  const kept = (name) => (name === "open" && old.nodeName === "DETAILS") || (name === "aria-sort" && old.nodeName === "TH");
  for (const { name, value } of now.attributes) if (!kept(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const { name } of [...old.attributes]) if (!kept(name) && !now.hasAttribute(name)) old.removeAttribute(name);
  if (now.dataset.chart || old.nodeName === "TIME") return; // filled by scripts
  const olds = [...old.childNodes], nows = [...now.childNodes];
  nows.forEach((node, i) => (i < olds.length ? morph(olds[i], node) : old.append(node)));
  olds.slice(nows.length).forEach((node) => node.remove());
}

function replace(section, html) {
  const box = make("template");
  box.innerHTML = html;
  const tables = [...section.querySelectorAll("table.sortable")];
  tables.forEach((table) => table.unsort && table.unsort());
  const now = make("section");
  for (const { name, value } of section.attributes) now.setAttribute(name, value);
  now.append(box.content);
  morph(section, now);
  start(section);
  tables.forEach((table) => table.isConnected && table.resort && table.resort());
}

function grow(begun) {
  for (const group of data.curves) if (group.name in begun) group.begun = begun[group.name];
}

function apply(change) {
  ahead = change.now - Date.now() / 1000;
  seen = change.seen;
  if (change.title) document.title = change.title;
  if (change.header) ["h1", "p:nth-of-type(2)", "p:nth-of-type(3)", "p:nth-of-type(4)"].forEach((at, i) => { document.querySelector("header " + at).textContent = change.header[i]; });
  if (change.data) data = change.data;
  if (change.begun) grow(change.begun);
  const main = document.querySelector("main");
  for (const section of [...main.children]) if (!change.order.includes(section.id)) section.remove();
  change.order.forEach((key, i) => {
    let section = document.getElementById(key);
    if (!section) section = make("section", { id: key, "aria-labelledby": key + "-title" });
    if (main.children[i] !== section) main.insertBefore(section, main.children[i] || null);
    if (key in change.parts) replace(section, change.parts[key]);
  });
  if (change.links) {
    const list = document.querySelector("nav ul");
    list.replaceChildren();
    for (const [key, title] of change.links) make("a", { href: "#" + key }, make("li", {}, list), title);
  }
  if (change.data || change.begun) for (const root of document.querySelectorAll("[data-chart]")) if (root.update) root.update();
}

let asking = false;
async function ask() {
  if (asking || document.hidden) return;
  asking = true;
  try {
    const answer = await fetch(`changes?seen=${encodeURIComponent(seen)}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    apply(await answer.json());
    lost.textContent = "";
  } catch (error) {
    lost.textContent = "No answer from fedncv watch: it was stopped, or cannot be reached. The page shows what was last known, and goes on when it answers.";
    if (!(error instanceof TypeError)) console.error(error);
  }
  asking = false;
  ages();
}
grow(data.begun);
ages();
document.title = data.live.title;
setInterval(ask, EVERY);
document.addEventListener("visibilitychange", ask);
